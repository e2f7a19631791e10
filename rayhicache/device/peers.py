"""`PeerDevice`: a device whose ranks move the bytes of replicated pools together.

A decorator of any device. Each rank moves its share of a plan's rows the device's usual way and
passes every layer on to its peers' memory as it lands; a landing then has one more event per
peer. A finish event that is recorded behind such a copy fails if a peer didn't do its part, so
the ticket ends failed. Everything else is the device's own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rayhicache.device.peer_board import wait_until
from rayhicache.device.peer_group import PeerBackend, PeerGroup, PeerLimits, PeerSeat
from rayhicache.device.peer_lane import PeerLane
from rayhicache.device.peer_transfer import Transfer
from rayhicache.device.protocols import Device, Direction, Event, Landing, Stream
from rayhicache.device.staging import EventBorrower, StagedPlan

if TYPE_CHECKING:
    import torch

    from rayhicache.device.digests import PageSums
    from rayhicache.device.paged import PagedGather
    from rayhicache.device.space import PoolMemory

__all__ = ["PeerDevice", "PeerLimits", "PeerSeat"]


class PeerEvent:
    """An event of the inner device, and the transfer that it was recorded behind, if any.

    It has passed once the peers, too, have closed that transfer.
    """

    def __init__(self, group: PeerGroup, inner: Event) -> None:
        self.inner = inner
        self.transfer: Transfer | None = None
        self._group = group

    def words(self) -> list[PeerWord]:
        """What it waits for of the peers'."""
        if self.transfer is None:
            return []
        number = self.transfer.number
        return [PeerWord(self._group, offset, number) for offset in self.transfer.last]

    def query(self) -> bool:
        """See `Event.query`."""
        return self.inner.query() and all(word.query() for word in self.words())

    def synchronize(self, timeout: float | None) -> bool:
        """See `Event.synchronize`; a peer that didn't do its part has failed the work, too."""
        transfer = self.transfer
        if transfer is None:
            return self.inner.synchronize(timeout)
        start = time.monotonic()
        try:
            if not self.inner.synchronize(timeout):
                return False
        except RuntimeError as fault:
            self._group.collapse(f"its copies failed: {fault}")
            raise
        left = None if timeout is None else max(timeout - (time.monotonic() - start), 0)
        if not wait_until(lambda: all(word.query() for word in self.words()), left):
            return False
        if cause := transfer.why_not_whole():
            raise RuntimeError(cause)
        return True


class PeerWord:
    """See `Event`: passed once a peer's word has reached the transfer."""

    def __init__(self, group: PeerGroup, offset: int, value: int) -> None:
        self.offset = offset
        self.value = value
        self._board = group.board

    def query(self) -> bool:
        """See `Event.query`. Reads host memory."""
        return self._board.reached(self.offset, self.value)

    def synchronize(self, timeout: float | None) -> bool:
        """See `Event.synchronize`."""
        return wait_until(self.query, timeout)


class PeerStream:
    """A stream of the inner device that knows the other ranks' words, and its last transfer."""

    def __init__(self, group: PeerGroup, inner: Stream) -> None:
        self.name = inner.name
        self.inner = inner
        self.transfer: Transfer | None = None
        self._group = group

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        if isinstance(event, PeerEvent):
            event.transfer, self.transfer = self.transfer, None
            event = event.inner
        self.inner.record(event)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        if isinstance(event, PeerEvent):
            self.inner.wait(event.inner)
            words = event.words()
        else:
            words = [event] if isinstance(event, PeerWord) else []
            if not words:
                self.inner.wait(event)
        for word in words:
            self._group.backend.wait_word(self.inner, word.offset, word.value)


class PeerDevice:
    """See `Device`. Any thread may call.

    Every rank starts the same loads and the same stores in the same order, of the same slots; its
    device blocks are its own. Until `connect`, and whenever the ranks can't move together, it
    does what the inner device does.

    Args:
        inner: the device.
        backend: how it reaches peers.
        seat: of this rank.
        limits: the same on all ranks.
        numbering: the number of a plan among its direction's, from 1, ascending, the same on all
            ranks; a rank may leave numbers out. Without it each rank counts its own copies, and a
            copy that one rank alone leaves out ends moving together.
    """

    def __init__(
        self,
        inner: Device,
        backend: PeerBackend,
        seat: PeerSeat,
        *,
        limits: PeerLimits | None = None,
        numbering: Callable[[StagedPlan], int] | None = None,
    ) -> None:
        self.inner = inner
        self.torch_device = inner.torch_device
        self.group = PeerGroup(seat, backend, limits or PeerLimits())
        self._lanes = {
            way: PeerLane(self.group, inner, way, numbering, PeerWord) for way in Direction
        }

    def connect(self, memories: Mapping[str, PoolMemory]) -> bool:
        """Meet the other ranks; see `PeerGroup.connect`. Before the first copy."""
        return self.group.connect(memories)

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return PeerStream(self.group, self.inner.current_stream())

    def new_stream(self, name: str) -> PeerStream:
        """See `Device.new_stream`."""
        return PeerStream(self.group, self.inner.new_stream(name))

    def new_event(self) -> PeerEvent:
        """See `Device.new_event`."""
        return PeerEvent(self.group, self.inner.new_event())

    def capturing(self) -> bool:
        """See `Device.capturing`."""
        return self.inner.capturing()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.empty`; peers may be given it to write to."""
        return self.group.backend.empty(shape, dtype)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.pinned`."""
        return self.inner.pinned(shape, dtype)

    def upload(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See `Device.upload`."""
        return self.inner.upload(source, _peer(stream).inner)

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See `Device.record_on_stream`."""
        self.inner.record_on_stream(tensor, _peer(stream).inner)

    def map_host(self, data: torch.Tensor, record_bytes: int) -> None:
        """See `Device.map_host`."""
        self.inner.map_host(data, record_bytes)

    def unmap_host(self, data: torch.Tensor) -> None:
        """See `Device.unmap_host`."""
        self.inner.unmap_host(data)

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`.

        Raises:
            PeerMismatch: another rank means another plan by this transfer; nothing is enqueued.
            PeerLost: a peer ended, or gave this transfer up, or didn't enqueue its part in time;
                an event that is recorded next passes when nothing of theirs can land any more.
        """
        stream = _peer(stream)
        own = replace(staged, events=EventBorrower(self.inner, deque()))
        if self.group.apart:
            yield from self.inner.copy(own, stream.inner)
            return
        lane = self._lanes[staged.direction]
        transfer = lane.begin(own, stream.inner)
        if transfer is None:
            yield from self.inner.copy(own, stream.inner)
            return
        stream.transfer = transfer
        yield from lane.move(transfer, stream.inner)

    def digests(self, staged: StagedPlan, stream: Stream) -> PageSums:
        """See `Device.digests`: of all pages of the plan, whoever moves them."""
        own = replace(staged, events=EventBorrower(self.inner, deque()))
        return self.inner.digests(own, _peer(stream).inner)

    def gather(self, gather: PagedGather) -> tuple[torch.Tensor, ...]:
        """See `Device.gather`."""
        return self.inner.gather(gather)

    def close(self) -> None:
        """See `Device.close`; the other ranks go on by themselves."""
        self.group.close()
        self.inner.close()


def _peer(stream: Stream) -> PeerStream:
    assert isinstance(stream, PeerStream), "a copy needs a stream of this device"
    return stream
