"""The tier told naively: one dict of records, no indexes, no heaps, no free lists.

Slow and plain, so that it is right by reading. A test drives it beside a real tier and compares
what both say; it learns slot references from the real one and predicts everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from rayhicache.core.keys import PageKey
from rayhicache.core.slots import SlotEntry, SlotRef


class ModelState(Enum):
    """Of a record; a slot without a record is free."""

    FILLING = "filling"
    SEALED = "sealed"
    READY = "ready"
    HIDDEN = "hidden"


@dataclass(slots=True)
class ModelRecord:
    """One record. `open_parts` maps a part to its session, 0 if nobody claimed it."""

    key: PageKey
    parent: PageKey | None
    open_parts: dict[int, int]
    state: ModelState = ModelState.FILLING
    stamp: int = 0
    adopted: bool = False


@dataclass(slots=True)
class ModelLease:
    """One lease on some records."""

    session: int
    refs: tuple[SlotRef, ...]
    deadline: float | None


@dataclass(slots=True)
class TierModel:
    """A tier with one group of `num_slots` slots, whose prefixes need all their pages."""

    num_slots: int
    num_parts: int = 1
    sessions: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    records: dict[SlotRef, ModelRecord] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    waiters: dict[int, tuple[int, set[PageKey]]] = field(default_factory=dict)
    wakes: dict[int, bool] = field(default_factory=dict)
    clock: int = 0

    def keys_in(self, state: ModelState) -> set[PageKey]:
        """Keys of the records in a state."""
        return {record.key for record in self.records.values() if record.state is state}

    def count(self, state: ModelState) -> int:
        """How many records are in a state."""
        return sum(record.state is state for record in self.records.values())

    def present(self, keys: Sequence[PageKey]) -> int:
        """How many leading keys are READY."""
        ready = self.keys_in(ModelState.READY)
        return next((at for at, key in enumerate(keys) if key not in ready), len(keys))

    def lookup(
        self, keys: Sequence[PageKey], session: int, lease: int | None, deadline: float | None
    ) -> int:
        """Predict a lookup; `lease` is the id that the real tier gave."""
        length = self.present(keys)
        if length:
            assert lease is not None
            refs = tuple(self._ready(key) for key in keys[:length])
            self.leases[lease] = ModelLease(session, refs, deadline)
            for ref in reversed(refs):
                self._touch(ref)
        return length

    def victims(self, count: int, keep: Iterable[PageKey | None]) -> list[SlotRef] | None:
        """The records to evict, in order, or None if there aren't enough."""
        gone: list[SlotRef] = []
        kept = set(keep)
        while len(gone) < count:
            left = {
                ref: record
                for ref, record in self.records.items()
                if record.state is ModelState.READY and ref not in gone
            }
            parents = {record.parent for record in left.values()}
            leaves = [
                ref
                for ref, record in left.items()
                if record.key not in parents and record.key not in kept and not self.is_held(ref)
            ]
            if not leaves:
                return None
            gone.append(min(leaves, key=lambda ref: left[ref].stamp))
        return gone

    def reserve(
        self, keys: Sequence[PageKey], parent: PageKey | None
    ) -> tuple[list[PageKey], list[PageKey], list[PageKey]] | None:
        """Predict a reservation and evict for it: missing, ready, filling; None for no room.

        `fill` must follow for each missing key.
        """
        ready, filling = self.keys_in(ModelState.READY), self.keys_in(ModelState.FILLING)
        missing = [key for key in keys if key not in ready | filling]
        short = len(missing) - (self.num_slots - len(self.records))
        victims = self.victims(short, {*keys, parent}) if short > 0 else []
        if victims is None:
            return None
        for ref in victims:
            del self.records[ref]
        return missing, [k for k in keys if k in ready], [k for k in keys if k in filling]

    def fill(
        self, ref: SlotRef, key: PageKey, parent: PageKey | None, fillers: Sequence[int]
    ) -> None:
        """The real tier gave `ref` for a missing key."""
        assert ref.slot not in {other.slot for other in self.records}
        self.records[ref] = ModelRecord(key, parent, dict(enumerate(fillers)))

    def commit(self, ref: SlotRef, part: int) -> int:
        """A part is there: 1 if the record turned READY."""
        record = self.records[ref]
        if record.state is ModelState.SEALED:
            self.pass_part(ref, part)
            return 0
        del record.open_parts[part]
        if record.open_parts:
            return 0
        record.state = ModelState.READY
        self._touch(ref)
        self._wake(record.key, ready=True)
        return 1

    def seal(self, ref: SlotRef) -> None:
        """Give a record up; its parts stay open."""
        record = self.records[ref]
        if record.state is ModelState.FILLING:
            record.state = ModelState.SEALED
            self._wake(record.key, ready=False)

    def pass_part(self, ref: SlotRef, part: int) -> None:
        """No copy of this part can land any more."""
        record = self.records[ref]
        self.seal(ref)
        record.open_parts.pop(part, None)
        if not record.open_parts:
            record.state = ModelState.HIDDEN
            self._sweep()

    def drop_lease(self, lease: int) -> None:
        """A lease ended."""
        del self.leases[lease]
        self._sweep()

    def expire(self, now: float) -> int:
        """Drop the leases whose deadline has passed."""
        late = [i for i, x in self.leases.items() if x.deadline is not None and x.deadline <= now]
        for lease in late:
            self.drop_lease(lease)
        return len(late)

    def doubt(self, keys: Iterable[PageKey]) -> int:
        """Hide READY records."""
        wanted = set(keys) & self.keys_in(ModelState.READY)
        for key in wanted:
            self.records[self._ready(key)].state = ModelState.HIDDEN
        self._sweep()
        return len(wanted)

    def park(self, keys: Iterable[PageKey], session: int, waiter: int | None) -> bool:
        """Whether somebody has to wait; `waiter` is the id that the real tier gave."""
        waiting = set(keys) & self.keys_in(ModelState.FILLING)
        if waiting:
            assert waiter is not None
            self.waiters[waiter] = (session, waiting)
        return bool(waiting)

    def end_session(self, session: int) -> None:
        """A process is gone, and with it all that it held."""
        self.sessions.discard(session)
        for lease in [i for i, lease in self.leases.items() if lease.session == session]:
            self.drop_lease(lease)
        self.waiters = {i: w for i, w in self.waiters.items() if w[0] != session}
        for ref, record in list(self.records.items()):
            for part in [p for p, filler in record.open_parts.items() if filler == session]:
                self.pass_part(ref, part)
        self._settle(session)

    def crash(self, stamps: Mapping[int, SlotEntry]) -> None:
        """The owner died and its next life adopted what the table (`stamps`, in order) says."""
        self.pending, self.sessions = set(self.sessions) | self.pending, set()
        self.leases, self.waiters, self.wakes = {}, {}, {}
        for record in self.records.values():
            record.adopted = True
            if record.open_parts:
                record.state = ModelState.SEALED
                record.open_parts = dict.fromkeys(record.open_parts, 0)
        for ref in sorted(self.records, key=lambda ref: list(stamps).index(ref.slot)):
            self._touch(ref)
        if not self.pending:
            self._finish()

    def reattach(
        self,
        session: int,
        lease: int | None,
        reading: Sequence[SlotRef],
        writing: Iterable[SlotRef],
        part: int,
    ) -> None:
        """A process of the earlier life named what it uses."""
        self.sessions.add(session)
        for ref in writing:
            self.records[ref].open_parts[part] = session
        if reading:
            assert lease is not None
            self.leases[lease] = ModelLease(session, tuple(reading), None)
        self._settle(session)

    def is_held(self, ref: SlotRef) -> bool:
        """Whether somebody may be reading a record."""
        leased = any(ref in lease.refs for lease in self.leases.values())
        return leased or self.records[ref].adopted

    def _settle(self, session: int) -> None:
        if session in self.pending:
            self.pending.discard(session)
            if not self.pending:
                self._finish()

    def _finish(self) -> None:
        for ref, record in list(self.records.items()):
            record.adopted = False
            for part in [p for p, filler in record.open_parts.items() if not filler]:
                self.pass_part(ref, part)
        self._sweep()

    def _sweep(self) -> None:
        for ref, record in list(self.records.items()):
            if record.state is ModelState.HIDDEN and not self.is_held(ref):
                del self.records[ref]

    def _ready(self, key: PageKey) -> SlotRef:
        return next(
            ref
            for ref, record in self.records.items()
            if record.key == key and record.state is ModelState.READY
        )

    def _touch(self, ref: SlotRef) -> None:
        self.clock += 1
        self.records[ref].stamp = self.clock

    def _wake(self, key: PageKey, *, ready: bool) -> None:
        for waiter, (_, keys) in list(self.waiters.items()):
            if key in keys:
                keys.discard(key)
                if not ready or not keys:
                    del self.waiters[waiter]
                    self.wakes[waiter] = ready
