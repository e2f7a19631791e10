"""The host as a device, for machines without a GPU and for tests that hold a race open.

The current stream is the calling thread itself, so a wait there blocks it, with a limit; inside
`with device.use(stream)` it is that stream, as `torch.cuda.stream` does.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch

from rayhicache.device.cpu_memory import CachingAllocator
from rayhicache.device.cpu_stream import CpuEvent, CpuStream, HostStream
from rayhicache.device.digests import PageSums, add_with_torch, new_sums, whole_pages
from rayhicache.device.paged import PagedGather, gather_with_torch
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.staging import StagedPlan, StagedTransfer


class CpuDevice:
    """A `Device` in the host's memory.

    Args:
        wait_seconds: how long a wait may block the calling thread.
    """

    def __init__(self, *, wait_seconds: float = 30.0) -> None:
        self.torch_device = torch.device("cpu")
        self._host = HostStream(wait_seconds)
        self._current: ContextVar[CpuStream | None] = ContextVar("cpu_stream", default=None)
        self._allocator = CachingAllocator()
        self._streams: list[CpuStream] = []

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return self._current.get() or self._host

    @contextlib.contextmanager
    def use(self, stream: CpuStream) -> Iterator[CpuStream]:
        """Make the stream the current one of this context."""
        token = self._current.set(stream)
        try:
            yield stream
        finally:
            self._current.reset(token)

    def new_stream(self, name: str) -> CpuStream:
        """See `Device.new_stream`."""
        stream = CpuStream(name)
        self._streams.append(stream)
        return stream

    def new_event(self) -> CpuEvent:
        """See `Device.new_event`."""
        return CpuEvent()

    def capturing(self) -> bool:
        """See `Device.capturing`; a thread captures no graph."""
        return False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.empty`."""
        return self._allocator.empty(shape, dtype)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See `Device.upload`."""
        target = self.empty(source.shape, source.dtype)
        # The operation holds bare memory, not the tensor: a caller that drops the tensor early
        # loses it, as on a GPU.
        address = target.data_ptr()
        count, dtype = source.numel(), source.dtype

        def copy() -> None:
            if count:
                _at(address, count, dtype).copy_(source)

        _cpu(stream).enqueue(copy, "upload")
        return target

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See `Device.record_on_stream`."""
        self._allocator.record(tensor, _cpu(stream))

    def map_host(self, data: torch.Tensor, record_bytes: int) -> None:
        """See `Device.map_host`; the host reaches its own memory."""

    def unmap_host(self, data: torch.Tensor) -> None:
        """See `Device.unmap_host`."""

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`; one operation and one event per layer and pool."""
        for layer_id, transfers in staged.layers():
            for transfer in transfers:
                yield self.copy_layer(staged, transfer, layer_id, stream)

    def copy_layer(
        self, staged: StagedPlan, transfer: StagedTransfer, layer_id: int, stream: Stream
    ) -> Landing:
        """Enqueue one layer of one pool: what `copy` is made of. Doesn't block."""
        move = layer_mover(staged, transfer, layer_id)
        _cpu(stream).enqueue(move, f"{staged.direction.value} {transfer.pool} {layer_id}")
        event = staged.events.take()
        stream.record(event)
        return Landing(layer_id=layer_id, pools=(transfer.pool,), events=(event,))

    def digests(self, staged: StagedPlan, stream: Stream) -> PageSums:
        """See `Device.digests`; one operation of the stream itself."""
        space = staged.space
        sums = {
            group: new_sums(space, group, count, self.torch_device)
            for group, count in whole_pages(staged).items()
        }
        moving = [transfer for transfer in staged.transfers if transfer.count]

        def add() -> None:
            for transfer in moving:
                rows = _at(transfer.device_indices.data_ptr(), transfer.count, torch.int64)
                group = space.layout.pool(transfer.pool).group
                add_with_torch(space, transfer, rows, sums[group])

        _cpu(stream).enqueue(add, "digests")
        event = staged.events.take()
        stream.record(event)
        return PageSums(sums=sums, event=event)

    def gather(self, gather: PagedGather) -> tuple[torch.Tensor, ...]:
        """See `Device.gather`; refuses indices that are none of the blocks."""
        return gather_with_torch(gather)

    def close(self) -> None:
        """See `Device.close`."""
        for stream in self._streams:
            stream.close()


def layer_mover(staged: StagedPlan, transfer: StagedTransfer, layer_id: int) -> Callable[[], None]:
    """The operation that moves one layer of one pool; it reads its indices when it runs."""
    space = staged.space
    spec = space.layout.pool(transfer.pool)
    blocks = space.layout.blocks_per_page(transfer.pool)
    first = space.regions[spec.group].region.first_slot * blocks
    sides = [
        (space.host_rows(spec.name, layer_id, part), space.device_rows(spec.name, layer_id, part))
        for part, component in enumerate(spec.components)
        if component.block_bytes
    ]
    count = transfer.count
    host_address = transfer.host_indices.data_ptr()
    device_address = transfer.device_indices.data_ptr()
    load = staged.direction is Direction.LOAD

    def move() -> None:
        if not count:
            return
        at = _at(host_address, count, torch.int64) - first
        rows = _at(device_address, count, torch.int64)
        slots, parts = torch.div(at, blocks, rounding_mode="floor"), at % blocks
        for host, device in sides:
            if load:
                device[rows] = host[slots, parts]
            else:
                host[slots, parts] = device[rows]

    return move


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over bare memory, as a kernel sees it: valid only while somebody keeps it so."""
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def _cpu(stream: Stream) -> CpuStream:
    assert isinstance(stream, CpuStream), "a copy needs a stream of this device"
    return stream
