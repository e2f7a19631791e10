"""The hybrid move path: every pool transfer's indices go to where copies read them.

`StagedPlan` is the only thing that copies accept, and only `move_hybrid_indices` makes one, of
the main pool and every side pool alike; so no pool's indices can be left behind. Two protections
keep an index tensor's memory from being reused while a copy reads it: it is recorded on the copy
stream, and the plan that is in flight holds it.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayhicache.core.plan import Indices, TransferPlan, check_plan, merge_plans
from rayhicache.device.protocols import Device, Direction, Event, Stream
from rayhicache.device.space import TransferSpace
from rayhicache.errors import GateTimeout

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedTransfer:
    """One pool's indices where copies read them.

    Attributes:
        host_indices, device_indices: `int64[count], device`.
        pinned: `int64[2 * count], pinned`: the same, host indices first, for copies whose
            addresses the host computes.
    """

    pool: str
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    pinned: torch.Tensor
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedPlan:
    """What a device copies: merged over a batch, main pool first.

    Attributes:
        direction: LOAD or STORE.
        space: where both sides lie.
        host_indices, device_indices: of the main pool, `int64[n]`.
        pool_transfers: every other pool.
        transfers: all pools, in layout order.
        entry: of the ring, holds all indices unchanged until the plan is retired.
        events: where the device takes the events of its landings from.
    """

    direction: Direction
    space: TransferSpace
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    pool_transfers: tuple[StagedTransfer, ...]
    transfers: tuple[StagedTransfer, ...]
    entry: RingEntry
    events: EventBorrower

    def layers(self) -> list[tuple[int, list[StagedTransfer]]]:
        """The layers that move, in the order of the forward, each with its transfers."""
        found: dict[int, list[StagedTransfer]] = {}
        for transfer in self.transfers:
            for layer_id in self.space.layout.pool(transfer.pool).layer_ids:
                found.setdefault(layer_id, []).append(transfer)
        return sorted(found.items())


class EventBorrower:
    """Events of one ticket, from a shared free list; all return at once when it is retired."""

    def __init__(self, device: Device, free: deque[Event]) -> None:
        self._device = device
        self._free = free
        self._lent: list[Event] = []

    def take(self) -> Event:
        """An event that no open ticket uses."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._device.new_event()
        self._lent.append(event)
        return event

    def give_back(self) -> None:
        """The ticket is closed: nobody waits on its events any more."""
        self._free.extend(self._lent)
        self._lent.clear()


@dataclass(slots=True, eq=False)
class RingEntry:
    """A run of the ring that belongs to one plan until it is retired."""

    start: int
    size: int
    memory: torch.Tensor
    retired: bool = False


class IndexRing:
    """Pinned memory for index uploads; an entry isn't reused before its copy has finished.

    Args:
        capacity: indices that fit; a longer run gets memory of its own.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._memory = device.pinned((capacity,), torch.int64)
        self._capacity = capacity
        self._head = 0
        self._entries: deque[RingEntry] = deque()
        self._changed = threading.Condition()

    def take(self, size: int, timeout: float) -> RingEntry:
        """An entry for `size` indices; blocks until copies ahead of it have finished.

        Raises:
            GateTimeout: no room within the limit.
        """
        if size > self._capacity // 2:
            return RingEntry(0, size, self._device.pinned((size,), torch.int64))
        with self._changed:
            if not self._changed.wait_for(lambda: self._start(size) is not None, timeout):
                raise GateTimeout(
                    asked=f"stage {size} indices",
                    found=f"{len(self._entries)} copies in flight hold the ring for {timeout} s",
                    remedy="see which copy stream hangs",
                )
            start = self._start(size)
            assert start is not None
            entry = RingEntry(start, size, self._memory[start : start + size])
            self._head = start + size
            self._entries.append(entry)
            return entry

    def retire(self, entry: RingEntry) -> None:
        """The copy that reads the entry has finished."""
        with self._changed:
            entry.retired = True
            while self._entries and self._entries[0].retired:
                self._entries.popleft()
            self._changed.notify_all()

    def in_use(self) -> int:
        """Entries that copies in flight still hold."""
        with self._changed:
            return len(self._entries)

    def _start(self, size: int) -> int | None:
        if not self._entries:
            return 0
        tail = self._entries[0].start
        if self._head > tail:
            if self._head + size <= self._capacity:
                return self._head
            return 0 if size < tail else None
        return self._head if self._head + size < tail else None


class Staging:
    """Moves the indices of one lane's plans. Called on the lane's thread only, but `retire`."""

    def __init__(
        self,
        device: Device,
        space: TransferSpace,
        stream: Stream,
        *,
        ring_indices: int = 1 << 16,
        timeout: float = 30.0,
    ) -> None:
        self._device = device
        self._space = space
        self._stream = stream
        self._ring = IndexRing(device, ring_indices)
        self._events: deque[Event] = deque()
        self._timeout = timeout

    def move_indices(
        self, pairs: Sequence[tuple[Indices, Indices]], memory: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Move pairs of host and device indices to where copies read them, all in one upload.

        Args:
            memory: `int64[2n], pinned` for n pairs of indices in all; unchanged until the work
                that reads them is done.

        Returns:
            Per pair `int64[its n]` twice, parts of one tensor; valid for work enqueued on the
            stream after this call.
        """
        packed = array("q")
        for pair in pairs:
            for indices in pair:
                packed.extend(indices)
        if packed:
            memory.copy_(torch.frombuffer(packed, dtype=torch.int64))
        moved = self._device.upload(memory, self._stream)
        counts = [len(indices) for pair in pairs for indices in pair]
        runs = iter(torch.split(moved, counts))
        return [(host, device) for host, device in zip(runs, runs, strict=True)]

    def move_hybrid_indices(
        self, plans: Sequence[TransferPlan], direction: Direction
    ) -> StagedPlan | None:
        """Move the indices of every pool of a batch's plans; None if nothing is to move.

        Everything is checked before anything is enqueued; the plans are left as they are.

        Raises:
            InvalidPlan: a pool left behind, uneven sides, an index out of range.
            GateTimeout: the ring stays full.
        """
        limits = self._space.limits()
        for plan in plans:
            check_plan(plan, self._space.layout, limits)
        merged = merge_plans(plans, self._space.layout)
        if not any(transfer.host_indices for transfer in merged):
            return None
        # One run of the ring for all pools: a plan never waits for room that it holds itself,
        # and one that finds no room leaves nothing behind.
        pairs = [(t.host_indices or (), t.device_indices or ()) for t in merged]
        counts = [len(host) for host, _ in pairs]
        entry = self._ring.take(2 * sum(counts), self._timeout)
        runs = torch.split(entry.memory, [2 * count for count in counts])
        staged = [
            StagedTransfer(
                pool=transfer.pool,
                host_indices=host,
                device_indices=device,
                pinned=run,
                count=count,
            )
            for transfer, count, run, (host, device) in zip(
                merged, counts, runs, self.move_indices(pairs, entry.memory), strict=True
            )
        ]
        return StagedPlan(
            direction=direction,
            space=self._space,
            host_indices=staged[0].host_indices,
            device_indices=staged[0].device_indices,
            pool_transfers=tuple(staged[1:]),
            transfers=tuple(staged),
            entry=entry,
            events=EventBorrower(self._device, self._events),
        )

    def record_transfer_indices_on_stream(
        self,
        stream: Stream,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        pool_transfers: Sequence[StagedTransfer],
    ) -> None:
        """Record every index tensor of a plan that lies on the device, before its first copy.

        Host-side indices are recorded too: they were moved there.
        """
        pairs = [(host_indices, device_indices)]
        pairs += [(t.host_indices, t.device_indices) for t in pool_transfers]
        for pair in pairs:
            for tensor in pair:
                if tensor.device == self._device.torch_device:
                    self._device.record_on_stream(tensor, stream)

    def retire(self, staged: StagedPlan) -> None:
        """The plan's last copy has finished: its ring entry and events may be reused."""
        self._ring.retire(staged.entry)
        staged.events.give_back()
