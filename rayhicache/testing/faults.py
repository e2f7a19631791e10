"""Faults for tests and demonstrations: late pools, failing copies, a gate that is taken away.

Devices here are decorators of the `cpu` device. Nothing in the product imports this module.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rayhicache.device.cpu import CpuDevice
from rayhicache.device.cpu_stream import CpuEvent, CpuStream
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.staging import StagedPlan
from rayhicache.pools.base import DevicePool, PoolSet

if TYPE_CHECKING:
    import torch

    from rayhicache.device.digests import PageSums
    from rayhicache.device.paged import PagedGather


class DeviceDecorator:
    """A `Device` that hands everything on to a `CpuDevice`; the base of those below."""

    def __init__(self, inner: CpuDevice) -> None:
        self.inner = inner
        self.torch_device = inner.torch_device

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return self.inner.current_stream()

    def use(self, stream: CpuStream) -> contextlib.AbstractContextManager[CpuStream]:
        """See `CpuDevice.use`."""
        return self.inner.use(stream)

    def new_stream(self, name: str) -> CpuStream:
        """See `Device.new_stream`."""
        return self.inner.new_stream(name)

    def new_event(self) -> CpuEvent:
        """See `Device.new_event`."""
        return self.inner.new_event()

    def capturing(self) -> bool:
        """See `Device.capturing`."""
        return self.inner.capturing()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.empty`."""
        return self.inner.empty(shape, dtype)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.pinned`."""
        return self.inner.pinned(shape, dtype)

    def upload(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See `Device.upload`."""
        return self.inner.upload(source, stream)

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See `Device.record_on_stream`."""
        self.inner.record_on_stream(tensor, stream)

    def map_host(self, data: torch.Tensor, record_bytes: int) -> None:
        """See `Device.map_host`."""
        self.inner.map_host(data, record_bytes)

    def unmap_host(self, data: torch.Tensor) -> None:
        """See `Device.unmap_host`."""
        self.inner.unmap_host(data)

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`."""
        return self.inner.copy(staged, stream)

    def digests(self, staged: StagedPlan, stream: Stream) -> PageSums:
        """See `Device.digests`."""
        return self.inner.digests(staged, stream)

    def gather(self, gather: PagedGather) -> tuple[torch.Tensor, ...]:
        """See `Device.gather`."""
        return self.inner.gather(gather)

    def close(self) -> None:
        """See `Device.close`."""
        self.inner.close()


class HoldingDevice(DeviceDecorator):
    """Copies of some pools come late: they go to a stream of their own, which is paused.

    The copy stream waits for that stream at the end of each plan, so a ticket closes only after
    its held copies too.

    Args:
        pools: whose copies are held until `release`.
        direction: of the copies that are held.
    """

    def __init__(
        self,
        inner: CpuDevice,
        pools: Collection[str],
        *,
        direction: Direction = Direction.LOAD,
    ) -> None:
        super().__init__(inner)
        self._pools = frozenset(pools)
        self._direction = direction
        self.held = inner.new_stream("held")
        self.held.pause()

    def release(self) -> None:
        """Let the held copies go, those to come as well."""
        self.held.resume()

    def hold(self) -> None:
        """Hold copies again that haven't started."""
        self.held.pause()

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`."""
        if staged.direction is not self._direction:
            yield from self.inner.copy(staged, stream)
            return
        self._order(stream, self.held)  # held copies too come after the plan's fences and uploads
        try:
            for layer_id, transfers in staged.layers():
                for transfer in transfers:
                    target = self.held if transfer.pool in self._pools else stream
                    yield self.inner.copy_layer(staged, transfer, layer_id, target)
        finally:
            self._order(self.held, stream)

    def _order(self, first: Stream, then: Stream) -> None:
        event = self.inner.new_event()
        first.record(event)
        then.wait(event)


class CopyFault(RuntimeError):
    """The copy that a test asked to fail."""


class FailingDevice(DeviceDecorator):
    """Enqueueing a copy fails when it comes to a layer for which `fails` says so.

    Args:
        fails: called once per layer of each plan, with its direction and global layer id.
    """

    def __init__(self, inner: CpuDevice, fails: Callable[[Direction, int], bool]) -> None:
        super().__init__(inner)
        self._fails = fails

    @classmethod
    def at(cls, inner: CpuDevice, direction: Direction, layer_id: int) -> FailingDevice:
        """Fail every copy of that direction at that layer."""
        return cls(inner, lambda way, layer: way is direction and layer == layer_id)

    @classmethod
    def seeded(cls, inner: CpuDevice, seed: int, probability: float) -> FailingDevice:
        """Fail layers by chance; the same seed fails the same calls in order."""
        dice = random.Random(seed)
        return cls(inner, lambda _way, _layer: dice.random() < probability)

    def heal(self) -> None:
        """From now on nothing fails."""
        self._fails = lambda _way, _layer: False

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`.

        Raises:
            CopyFault: at a layer that fails; the layers before it are enqueued.
        """
        for layer_id, transfers in staged.layers():
            if self._fails(staged.direction, layer_id):
                raise CopyFault(f"asked to fail at layer {layer_id}")
            for transfer in transfers:
                yield self.inner.copy_layer(staged, transfer, layer_id, stream)


class BreakingDevice(DeviceDecorator):
    """The copy stream itself breaks when it comes to a layer: enqueueing goes well, and the
    fault is sticky, as a device's own is.

    Args:
        layer_id: global id of the first layer that isn't copied.
        direction: of the copies that break.
    """

    def __init__(
        self, inner: CpuDevice, layer_id: int, *, direction: Direction = Direction.LOAD
    ) -> None:
        super().__init__(inner)
        self._layer_id = layer_id
        self._direction = direction

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`."""
        assert isinstance(stream, CpuStream)
        for layer_id, transfers in staged.layers():
            if staged.direction is self._direction and layer_id == self._layer_id:
                stream.enqueue(self._break, "break")
            for transfer in transfers:
                yield self.inner.copy_layer(staged, transfer, layer_id, stream)

    def _break(self) -> None:
        raise CopyFault(f"asked to break at layer {self._layer_id}")


@contextlib.contextmanager
def ungated(pools: PoolSet, names: Collection[str]) -> Iterator[None]:
    """Take the gate of some pools away: inside, their readers don't wait for loads.

    It shows what the gate is for: what is read is whatever the device's pages hold. It replaces
    `layer` of those pool objects, through which every reader goes, and puts it back at the end.

    Raises:
        UnknownPool: a name that no pool has.
    """
    chosen = [pools.pool(name) for name in names]
    for pool in chosen:
        pool.__dict__["layer"] = functools.partial(_layer_at_once, pool)
    try:
        yield
    finally:
        for pool in chosen:
            del pool.__dict__["layer"]


def _layer_at_once(pool: DevicePool, layer_id: int, component: int = 0) -> torch.Tensor:
    """`DevicePool.layer` without its wait."""
    return pool._typed(layer_id, component)
