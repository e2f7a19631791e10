"""Peers of the `cuda` device: pools by CUDA IPC, copies by the copy engine over NVLink.

No kernel and no SM takes part: blocks go from this GPU's memory to a peer's by batched driver
copies, and words by writes that the stream does itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.driver import driver
from rayhicache.device.cuda.ipc import Ipc
from rayhicache.device.cuda.queue import CopyQueue
from rayhicache.device.cuda.stream import CudaStream
from rayhicache.device.cuda.words import WordBoard
from rayhicache.device.peer_board import Board
from rayhicache.device.peer_group import Pusher
from rayhicache.device.protocols import Stream
from rayhicache.device.space import PoolMemory
from rayhicache.errors import PeerUnreachable

WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One component in some GPU's memory, as this process addresses it."""

    address: int
    layer_bytes: int
    layers: int
    num_blocks: int
    nbytes: int


class CudaPeers:
    """A `PeerBackend` for ranks with one GPU each, or several on one, in processes of their own.

    Pools are memory that `cudaMalloc` gave, as torch's allocator takes it by default; expandable
    segments can't be exported, and such ranks load by themselves.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._driver = driver()
        self._ipc = Ipc()
        self._own_words = WordBoard()
        self._queues: dict[int, CopyQueue] = {}
        self._mine: dict[str, list[_Place]] = {}
        self._kept: list[PoolMemory] = []
        self._peers: dict[tuple[int, str], list[_Place]] = {}
        self._opened: dict[str, int] = {}
        self._host = 0
        self._words = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `PeerBackend.empty`."""
        return self._device.empty(shape, dtype)

    def export(self, memories: Mapping[str, PoolMemory]) -> Any:
        """See `PeerBackend.export`: per component a handle, and where in it the pool lies."""
        self._enter()
        self._kept = list(memories.values())
        told: dict[str, list[dict[str, Any]]] = {}
        for name, memory in memories.items():
            told[name], self._mine[name] = [], []
            for part in memory.components:
                layers, num_blocks, nbytes = part.shape
                shape = {
                    "layer_bytes": part.stride(0),
                    "layers": layers,
                    "num_blocks": num_blocks,
                    "nbytes": nbytes,
                }
                self._mine[name].append(_Place(address=part.data_ptr(), **shape))
                handle, offset = self._handle(part) if part.numel() else ("", 0)
                told[name].append({"handle": handle, "offset": offset, "shape": shape})
        return told

    def open(self, rank: int, exported: Any) -> None:
        """See `PeerBackend.open`."""
        self._enter()
        for pool, parts in exported.items():
            self._peers[rank, pool] = [
                _Place(address=self._reach(rank, part["handle"]) + part["offset"], **part["shape"])
                for part in parts
            ]

    def map_words(self, board: Board) -> None:
        """See `PeerBackend.map_words`: registers them with the driver."""
        self._enter()
        start, nbytes = board.address + board.shape.stream_start, board.shape.stream_bytes
        result = int(torch.cuda.cudart().cudaHostRegister(start, nbytes, 0))
        if result or not self._driver.can_wait or not self._driver.can_batch:
            raise PeerUnreachable(
                asked="let streams reach the board",
                found=f"registering it gave {result}, or the driver lacks stream memory operations",
                remedy="raise the memlock limit, or use a newer driver",
            )
        self._host = start
        self._words = self._ipc.device_address(start) - board.shape.stream_start

    def write_word(self, stream: Stream, offset: int, value: int) -> None:
        """See `PeerBackend.write_word`."""
        self._enter()
        self._driver.write_value(self._words + offset, value, _cuda(stream).cuda_stream)

    def wait_word(self, stream: Stream, offset: int, value: int) -> None:
        """See `PeerBackend.wait_word`; the host goes on."""
        self._driver.wait_value(self._words + offset, value, _cuda(stream))

    def pusher(self, rank: int, pool: str, mine: torch.Tensor, theirs: torch.Tensor) -> Pusher:
        """See `PeerBackend.pusher`."""
        tables = []
        for own, peer in zip(self._mine[pool], self._peers[rank, pool], strict=True):
            if not own.nbytes or not mine.numel():
                continue
            if not 0 <= int(theirs.min()) <= int(theirs.max()) < peer.num_blocks:
                raise PeerUnreachable(
                    asked=f"write blocks of pool {pool!r} of rank {rank}",
                    found=f"it has {peer.num_blocks} blocks",
                    remedy="plan with the pool's own limits",
                )
            layers = torch.arange(own.layers).unsqueeze(1)
            sources, targets = (
                place.address + layers * place.layer_bytes + rows * place.nbytes
                for place, rows in ((own, mine), (peer, theirs))
            )
            tables.append((targets, sources, torch.full((mine.numel(),), own.nbytes)))
        return _CudaPusher(self, tables, mine.numel())

    def queue(self, stream: torch.cuda.Stream) -> CopyQueue:
        """The paced queue of a stream. On that stream's thread."""
        if stream.cuda_stream not in self._queues:
            word = self._own_words.new_word()
            self._queues[stream.cuda_stream] = CopyQueue(self._driver, stream, word)
        return self._queues[stream.cuda_stream]

    def close(self) -> None:
        """See `PeerBackend.close`."""
        self._enter()
        while self._opened:
            self._ipc.close(self._opened.popitem()[1])
        if self._host:
            torch.cuda.cudart().cudaHostUnregister(self._host)
            self._host = 0

    def _enter(self) -> None:
        """Make the GPU's context the calling thread's; calls of the driver need one."""
        torch.cuda.set_device(self._device.torch_device)
        torch.cuda.current_stream().query()

    def _handle(self, part: torch.Tensor) -> tuple[str, int]:
        try:
            return self._ipc.export(part.data_ptr())
        except RuntimeError as fault:
            raise PeerUnreachable(
                asked="let peers reach a pool",
                found=str(fault),
                remedy="run without torch's expandable segments",
            ) from fault

    def _reach(self, rank: int, handle: str) -> int:
        if handle and handle not in self._opened:
            try:
                self._opened[handle] = self._ipc.open(handle)
            except RuntimeError as fault:
                raise PeerUnreachable(
                    asked=f"reach the memory of rank {rank}",
                    found=str(fault),
                    remedy="put the ranks on GPUs of one node with peer access",
                ) from fault
        return self._opened.get(handle, 0)


class _CudaPusher:
    """Copies of one pool to one peer; all addresses are worked out beforehand."""

    def __init__(
        self,
        peers: CudaPeers,
        tables: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        count: int,
    ) -> None:
        self._peers = peers
        self._tables = tables
        self._count = count

    def enqueue(self, stream: Stream, position: int) -> None:
        """See `Pusher.enqueue`; waits for room in the hardware's queue."""
        queue = self._peers.queue(_cuda(stream))
        row = position * self._count * WORD_BYTES
        for targets, sources, sizes in self._tables:
            # The source is a page that this very stream waits for: read in the stream's order.
            queue.copy(
                targets.data_ptr() + row,
                sources.data_ptr() + row,
                sizes.data_ptr(),
                self._count,
                settled=False,
            )


def _cuda(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, CudaStream), "a copy needs a stream of this device"
    return stream.stream
