"""Peers of the `cpu` device: pools in shared memory, which the streams of every rank reach."""

from __future__ import annotations

import math
import mmap
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rayhicache.device.cpu_stream import CpuStream
from rayhicache.device.peer_board import Board, wait_until
from rayhicache.device.peer_group import Pusher
from rayhicache.device.protocols import Stream
from rayhicache.device.space import PoolMemory
from rayhicache.errors import GateTimeout, PeerUnreachable
from rayhicache.memory.folder import make_private

Components = list[torch.Tensor]


class CpuPeers:
    """A `PeerBackend` for ranks on one host.

    Args:
        folder: where the memory that peers reach lies, by file; a rank's own files are unlinked
            when it closes.
        wait_seconds: how long a wait may block the calling thread.
    """

    def __init__(self, folder: Path, *, wait_seconds: float = 30.0) -> None:
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._files: dict[int, Path] = {}
        self._mine: dict[str, Components] = {}
        self._peers: dict[tuple[int, str], Components] = {}
        self._board: Board | None = None
        self._closed = threading.Event()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `PeerBackend.empty`."""
        if not math.prod(shape):
            return torch.empty(tuple(shape), dtype=dtype)
        make_private(self._folder)
        path = self._folder / f"memory-{secrets.token_hex(8)}"
        tensor = _mapped(path, shape, dtype, os.O_CREAT | os.O_EXCL)
        self._files[tensor.data_ptr()] = path
        return tensor

    def export(self, memories: Mapping[str, PoolMemory]) -> Any:
        """See `PeerBackend.export`: the file of each component."""
        self._mine = {name: list(memory.components) for name, memory in memories.items()}
        return {
            name: [
                {"file": str(self._files.get(part.data_ptr(), "")), "shape": list(part.shape)}
                for part in parts
            ]
            for name, parts in self._mine.items()
        }

    def open(self, rank: int, exported: Any) -> None:
        """See `PeerBackend.open`."""
        for pool, parts in exported.items():
            try:
                self._peers[rank, pool] = [
                    _mapped(Path(part["file"]), part["shape"], torch.uint8, 0)
                    if math.prod(part["shape"])
                    else torch.empty(part["shape"], dtype=torch.uint8)
                    for part in parts
                ]
            except OSError as fault:
                raise PeerUnreachable(
                    asked=f"reach pool {pool!r} of rank {rank}",
                    found=f"its memory can't be mapped: {fault}",
                    remedy="allocate pools on the `PeerDevice` itself",
                ) from fault

    def map_words(self, board: Board) -> None:
        """See `PeerBackend.map_words`; the host reaches its own memory."""
        self._board = board

    def write_word(self, stream: Stream, offset: int, value: int) -> None:
        """See `PeerBackend.write_word`."""
        board = self._words
        _cpu(stream).enqueue(lambda: board.set_word(offset, value), "write word")

    def wait_word(self, stream: Stream, offset: int, value: int) -> None:
        """See `PeerBackend.wait_word`.

        Raises:
            GateTimeout: the calling thread is the stream, and the word didn't come in time.
        """
        board = self._words
        if isinstance(stream, CpuStream):

            def hold() -> None:
                wait_until(
                    lambda: board.reached(offset, value) or stream.closed or self._closed.is_set(),
                    None,
                )

            stream.enqueue(hold, "wait word")
        elif not wait_until(lambda: board.reached(offset, value), self._wait_seconds):
            raise GateTimeout(
                asked="wait for a peer's copy",
                found=f"it wasn't done after {self._wait_seconds} s",
                remedy="see which rank hangs",
            )

    def pusher(self, rank: int, pool: str, mine: torch.Tensor, theirs: torch.Tensor) -> Pusher:
        """See `PeerBackend.pusher`."""
        pairs = [
            (own, peer)
            for own, peer in zip(self._mine[pool], self._peers[rank, pool], strict=True)
            if own.numel()
        ]
        num_blocks = min((peer.shape[1] for _, peer in pairs), default=0)
        if (
            theirs.numel()
            and pairs
            and not 0 <= int(theirs.min()) <= int(theirs.max()) < num_blocks
        ):
            raise PeerUnreachable(
                asked=f"write blocks of pool {pool!r} of rank {rank}",
                found=f"it has {num_blocks} blocks",
                remedy="plan with the pool's own limits",
            )
        return _CpuPusher(f"push {pool} to {rank}", pairs, mine, theirs)

    def close(self) -> None:
        """See `PeerBackend.close`."""
        self._closed.set()
        self._peers.clear()
        for path in self._files.values():
            path.unlink(missing_ok=True)
        self._files.clear()

    @property
    def _words(self) -> Board:
        assert self._board is not None, "the group isn't connected"
        return self._board


class _CpuPusher:
    def __init__(
        self,
        label: str,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        mine: torch.Tensor,
        theirs: torch.Tensor,
    ) -> None:
        self._label = label
        self._pairs = pairs
        self._mine = mine
        self._theirs = theirs

    def enqueue(self, stream: Stream, position: int) -> None:
        """See `Pusher.enqueue`."""

        def push() -> None:
            for own, peer in self._pairs:
                peer[position][self._theirs] = own[position][self._mine]

        _cpu(stream).enqueue(push, f"{self._label} {position}")


def _mapped(path: Path, shape: Sequence[int], dtype: torch.dtype, flags: int) -> torch.Tensor:
    """A tensor over a file of exactly its size."""
    nbytes = math.prod(shape) * dtype.itemsize
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        if flags:
            os.posix_fallocate(fd, 0, nbytes)
        memory = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def _cpu(stream: Stream) -> CpuStream:
    assert isinstance(stream, CpuStream), "a copy needs a stream of this device"
    return stream
