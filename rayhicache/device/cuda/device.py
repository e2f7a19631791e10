"""The `cuda` device: one NVIDIA GPU.

A load or store runs on its lane's stream by the copy engine; pools of small fragments run on a
second stream beside it by a kernel of few blocks, and the lane's stream joins them at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rayhicache.core.layout import PoolSpec
from rayhicache.device.cuda.bulk import BulkKernel, bulk_kernel
from rayhicache.device.cuda.driver import Driver, driver
from rayhicache.device.cuda.movers import BatchedMover, BulkMover, Mover, PageableMover
from rayhicache.device.cuda.registration import HostRegistration
from rayhicache.device.cuda.stream import CudaEvent, CudaStream
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.staging import StagedPlan, StagedTransfer
from rayhicache.errors import DeviceNotFound

Shares = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyChoice:
    """Which way the fragments of a pool take, by their size; measured on an H200.

    The copy engine takes no SM but about 0.6 us per fragment, so small fragments go by the
    kernel, and part of the middling ones beside the engine.

    Attributes:
        load, store: (fragment bytes, share of the rows that the kernel moves), ascending; the
            first that isn't smaller than the fragment counts, above the last one all rows go to
            the copy engine.
        blocks_beside: blocks of the kernel beside the copy engine, times its share of the bytes.
        blocks_alone: its blocks when it moves everything.
    """

    load: Shares = ((24_575, 1.0),)
    store: Shares = ((24_575, 1.0), (49_152, 0.6), (1 << 20, 0.2))
    blocks_beside: int = 5
    blocks_alone: int = 16

    def kernel_rows(self, direction: Direction, nbytes: int, count: int) -> int:
        """How many of `count` rows of that fragment size the kernel moves."""
        shares = self.load if direction is Direction.LOAD else self.store
        share = next((share for size, share in shares if nbytes <= size), 0.0)
        return round(share * count)

    def blocks(self, kernel_bytes: int, all_bytes: int) -> int:
        """Blocks of the kernel when it moves that part of a plan's bytes."""
        if kernel_bytes == all_bytes:
            return self.blocks_alone
        return max(self.blocks_beside * kernel_bytes // all_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    reachable: bool
    kernel_rows: int
    kernel_bytes: int
    all_bytes: int


class CudaDevice:
    """A `Device` on an NVIDIA GPU.

    Args:
        index: of the GPU.
        choice: of the way to copy.

    Raises:
        DeviceNotFound: no such GPU, or no driver.
    """

    def __init__(self, index: int = 0, *, choice: CopyChoice | None = None) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise DeviceNotFound(
                asked=f"use GPU {index}",
                found=f"torch sees {torch.cuda.device_count()} GPUs",
                remedy="run on a machine with an NVIDIA GPU and driver, or use the cpu device",
            )
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._choice = choice or CopyChoice()
        self._driver: Driver = driver()
        self._kernel: BulkKernel | None = bulk_kernel(index)
        self._lock = threading.Lock()
        self._registrations: dict[int, HostRegistration] = {}
        self._sides: dict[int, torch.cuda.Stream] = {}

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return CudaStream("current", torch.cuda.current_stream(self.torch_device))

    def capturing(self) -> bool:
        """See `Device.capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def new_stream(self, name: str) -> CudaStream:
        """See `Device.new_stream`."""
        stream = torch.cuda.Stream(self.torch_device)
        with self._lock:
            self._sides[stream.cuda_stream] = torch.cuda.Stream(self.torch_device)
        return CudaStream(name, stream)

    def new_event(self) -> CudaEvent:
        """See `Device.new_event`."""
        return CudaEvent()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.empty`."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See `Device.upload`."""
        with torch.cuda.stream(_cuda(stream).stream):
            return source.to(self.torch_device, non_blocking=True)

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See `Device.record_on_stream`."""
        tensor.record_stream(_cuda(stream).stream)

    def map_host(self, data: torch.Tensor, record_bytes: int) -> None:
        """See `Device.map_host`: registers the memory with the driver, in the background."""
        runtime = torch.cuda.cudart()
        registration = HostRegistration(
            data.data_ptr(),
            data.numel(),
            record_bytes,
            register=lambda address, nbytes: int(runtime.cudaHostRegister(address, nbytes, 0)),
            unregister=lambda address: int(runtime.cudaHostUnregister(address)),
        )
        with self._lock:
            self._registrations[data.data_ptr()] = registration

    def wait_mapped(self, data: torch.Tensor, timeout: float | None = None) -> bool:
        """Block until the memory is registered; False if it isn't, or not in time."""
        return self._registrations[data.data_ptr()].wait(timeout)

    def unmap_host(self, data: torch.Tensor) -> None:
        """See `Device.unmap_host`."""
        with self._lock:
            registration = self._registrations.pop(data.data_ptr(), None)
        if registration is not None:
            registration.close()

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`."""
        torch.cuda.set_device(self.torch_device)
        main = _cuda(stream)
        side = CudaStream(f"{main.name}-side", self._sides[main.stream.cuda_stream])
        shares = {t.pool: self._share(staged, t) for t in staged.transfers}
        blocks = self._choice.blocks(
            sum(share.kernel_bytes for share in shares.values()),
            max(sum(share.all_bytes for share in shares.values()), 1),
        )
        movers = {t.pool: self._movers(staged, t, shares[t.pool], blocks) for t in staged.transfers}
        ways = {
            pool: tuple(side if mover.beside else main for mover in mine)
            for pool, mine in movers.items()
        }
        forked = any(side in mine for mine in ways.values())
        if forked:
            event = staged.events.take()
            main.record(event)
            side.wait(event)
        try:
            for layer_id, transfers in staged.layers():
                for transfer in transfers:
                    spec = staged.space.layout.pool(transfer.pool)
                    position = spec.layer_ids.index(layer_id)
                    for mover, way in zip(movers[transfer.pool], ways[transfer.pool], strict=True):
                        mover.enqueue(position, way.stream)
                yield from _landings(staged, layer_id, {t.pool: ways[t.pool] for t in transfers})
        finally:
            # Also when the caller stops early: the lane's finish event covers the kernel's copies.
            if forked:
                event = staged.events.take()
                side.record(event)
                main.wait(event)

    def close(self) -> None:
        """See `Device.close`."""
        with self._lock:
            registrations, self._registrations = self._registrations, {}
        for registration in registrations.values():
            registration.close()

    def _share(self, staged: StagedPlan, transfer: StagedTransfer) -> _Share:
        """How the rows of a transfer are divided."""
        spec = staged.space.layout.pool(transfer.pool)
        sizes = [part.block_bytes for part in spec.components if part.block_bytes]
        if not transfer.count or not sizes:
            return _Share(reachable=True, kernel_rows=0, kernel_bytes=0, all_bytes=0)
        reachable = self._driver.can_batch and self._reachable(staged, spec, transfer)
        rows = self._choice.kernel_rows(staged.direction, min(sizes), transfer.count)
        if not reachable or self._kernel is None or not all(map(self._kernel.can_move, sizes)):
            rows = 0
        row_bytes = sum(sizes) * len(spec.layer_ids)
        return _Share(
            reachable=reachable,
            kernel_rows=rows,
            kernel_bytes=rows * row_bytes,
            all_bytes=transfer.count * row_bytes,
        )

    def _movers(
        self, staged: StagedPlan, transfer: StagedTransfer, share: _Share, blocks: int
    ) -> tuple[Mover, ...]:
        if not share.all_bytes:
            return ()
        if not share.reachable:
            return (PageableMover(staged, transfer),)
        movers: list[Mover] = []
        rows = share.kernel_rows
        if rows:
            assert self._kernel is not None
            movers.append(BulkMover(self._kernel, staged, transfer, blocks=blocks, stop=rows))
        if rows < transfer.count:
            movers.append(BatchedMover(self._driver, staged, transfer, start=rows))
        return tuple(movers)

    def _reachable(self, staged: StagedPlan, spec: PoolSpec, transfer: StagedTransfer) -> bool:
        """Whether the GPU can reach every record of the transfer: its memory is registered."""
        host = staged.space.regions[spec.group]
        if host.data.is_pinned():
            return True
        registration = self._registrations.get(host.data.data_ptr())
        if registration is None:
            return False
        blocks = staged.space.layout.blocks_per_page(spec.name)
        last = int(transfer.pinned[: transfer.count].max()) // blocks - host.region.first_slot
        return (last + 1) * host.region.record_bytes <= registration.ready_bytes


def _landings(
    staged: StagedPlan, layer_id: int, ways: dict[str, tuple[CudaStream, ...]]
) -> Iterator[Landing]:
    """One event per stream that this layer's copies were enqueued on; a pool may need both."""
    events: dict[int, CudaEvent] = {}
    for stream in dict.fromkeys(way for mine in ways.values() for way in mine):
        event = staged.events.take()
        stream.record(event)
        assert isinstance(event, CudaEvent)
        events[id(stream)] = event
    alike: dict[tuple[int, ...], list[str]] = {}
    for pool, mine in ways.items():
        alike.setdefault(tuple(id(way) for way in mine), []).append(pool)
    for streams, pools in alike.items():
        yield Landing(
            layer_id=layer_id, pools=tuple(pools), events=tuple(events[at] for at in streams)
        )


def _cuda(stream: Stream) -> CudaStream:
    assert isinstance(stream, CudaStream), "a copy needs a stream of this device"
    return stream
