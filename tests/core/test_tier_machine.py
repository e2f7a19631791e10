"""The tier against a naive model, through every kind of call in any order, crashes included."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rayhicache.core.keys import PageKey
from rayhicache.core.slots import SlotRef
from rayhicache.core.tier import Tier
from rayhicache.errors import StaleSlot, UnknownLease
from rayhicache.testing.model import ModelState, TierModel
from tiers import RecordedTable, key, keys, plain_layout, refs_of, regions, session

SLOTS = 5
# Three prompts that share prefixes of two, one and no pages.
PROMPTS = (keys(1, 2, 3, 4), keys(1, 2, 13, 14), keys(1, 22), keys(31, 32, 33))
prompts = st.sampled_from(PROMPTS)
picks = st.integers(0, 1_000_000)


class TierMachine(RuleBasedStateMachine):
    """Each rule makes one call on both and compares the answers."""

    @initialize(parts=st.integers(1, 2))
    def start(self, parts: int) -> None:
        self.layout = plain_layout(num_stages=parts)
        self.table = RecordedTable()
        self.tier = Tier(self.layout, regions(self.layout, SLOTS), table=self.table)
        self.model = TierModel(num_slots=SLOTS, num_parts=parts)
        self.now = 0.0
        self.next_session = 1
        self.next_first_lease = 1
        self.reading: dict[int, list[SlotRef]] = {}
        self.writing: dict[int, list[tuple[SlotRef, int]]] = {}
        self.open()
        self.open()

    def some_session(self, pick: int) -> int | None:
        known = sorted(self.model.sessions)
        return known[pick % len(known)] if known else None

    def some_part(self, pick: int, *states: ModelState) -> tuple[SlotRef, int, int] | None:
        """A record with an open part of an open session: reference, part, session."""
        known = [
            (ref, part, filler)
            for ref, record in sorted(self.model.records.items())
            if record.state in states
            for part, filler in sorted(record.open_parts.items())
            if filler
        ]
        return known[pick % len(known)] if known else None

    @precondition(lambda self: len(self.model.sessions | self.model.pending) < 4)
    @rule()
    def open(self) -> None:
        self.tier.open_session(session(self.next_session))
        self.model.sessions.add(self.next_session)
        self.next_session += 1

    @precondition(lambda self: self.model.sessions and self.model.count(ModelState.READY))
    @rule(prompt=prompts, length=st.integers(1, 4), who=picks, remote=st.booleans())
    def lookup(self, prompt: list[PageKey], length: int, who: int, remote: bool) -> None:
        by = self.some_session(who)
        if by is None:
            return
        asked = prompt[:length]
        hit = self.tier.lookup(asked, by, now=self.now, lease_seconds=5.0 if remote else None)
        lease = None if hit.lease is None else hit.lease.id
        deadline = self.now + 5.0 if remote else None
        assert hit.best == self.model.lookup(asked, by, lease, deadline)

    @precondition(lambda self: self.model.sessions)
    @rule(
        prompt=prompts,
        start=st.integers(0, 3),
        count=st.integers(1, 4),
        who=picks,
        other=picks,
        whole=st.booleans(),
    )
    def reserve(
        self, prompt: list[PageKey], start: int, count: int, who: int, other: int, whole: bool
    ) -> None:
        """Reserve a chunk; if `whole`, from the first page on and committed at once."""
        start = 0 if whole else start
        by, second = self.some_session(who), self.some_session(other)
        chunk = prompt[start : start + count]
        if by is None or second is None or not chunk:
            return
        fillers = (by, second)[: self.model.num_parts]
        parent = prompt[start - 1] if start else None
        found = self.tier.reserve(chunk, by, parent=parent, fillers=fillers)
        wanted = self.model.reserve(chunk, parent)
        if wanted is None:
            assert found is None
            return
        assert found is not None
        told = ([fill.key for fill in found.fills], list(found.ready), list(found.filling))
        assert told == wanted
        for fill, ref in zip(found.fills, refs_of(found.fills), strict=True):
            at = prompt.index(fill.key)
            self.model.fill(ref, fill.key, prompt[at - 1] if at else None, fillers)
        for part, filler in enumerate(fillers if whole else ()):
            stored = self.tier.commit(refs_of(found.fills), filler, part=part)
            assert stored == sum(self.model.commit(fill.ref, part) for fill in found.fills)

    @precondition(lambda self: self.some_part(0, ModelState.FILLING, ModelState.SEALED))
    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        found = self.some_part(pick, ModelState.FILLING, ModelState.SEALED)
        if found is not None:
            ref, part, by = found
            assert self.tier.commit([ref], by, part=part) == self.model.commit(ref, part)
            with pytest.raises(StaleSlot):
                self.tier.commit([ref], by, part=part)

    @precondition(lambda self: self.some_part(0, ModelState.FILLING, ModelState.SEALED))
    @rule(pick=picks, sealed=st.booleans())
    def abort(self, pick: int, sealed: bool) -> None:
        found = self.some_part(pick, ModelState.FILLING, ModelState.SEALED)
        if found is None:
            return
        ref, part, by = found
        self.tier.abort([ref], by, part=part, sealed=sealed)
        if sealed:
            self.model.seal(ref)
        else:
            self.model.pass_part(ref, part)
            with pytest.raises(StaleSlot):
                self.tier.abort([ref], by, part=part)

    @precondition(lambda self: self.some_part(0, ModelState.SEALED))
    @rule(pick=picks)
    def unseal(self, pick: int) -> None:
        found = self.some_part(pick, ModelState.SEALED)
        if found is not None:
            ref, part, by = found
            self.tier.unseal([ref], by, part=part)
            self.model.pass_part(ref, part)

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        lease = sorted(self.model.leases)[pick % len(self.model.leases)]
        self.tier.release(lease)
        self.model.drop_lease(lease)
        with pytest.raises(UnknownLease):
            self.tier.release(lease)

    @precondition(lambda self: self.model.count(ModelState.READY))
    @rule(prompt=prompts, start=st.integers(0, 3))
    def doubt(self, prompt: list[PageKey], start: int) -> None:
        assert self.tier.doubt(prompt[start:]) == self.model.doubt(prompt[start:])

    @precondition(lambda self: self.model.leases)
    @rule(seconds=st.floats(0.5, 6.0))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        assert self.tier.expire(self.now) == self.model.expire(self.now)

    @precondition(lambda self: self.model.sessions and self.model.count(ModelState.FILLING))
    @rule(prompt=prompts, who=picks)
    def park(self, prompt: list[PageKey], who: int) -> None:
        by = self.some_session(who)
        if by is not None:
            waiter = self.tier.park(prompt, by)
            assert (waiter is not None) == self.model.park(prompt, by, waiter)

    @precondition(lambda self: len(self.model.sessions | self.model.pending) > 2)
    @rule(who=picks)
    def end_session(self, who: int) -> None:
        known = sorted(self.model.sessions | self.model.pending)
        gone = known[who % len(known)]
        self.tier.end_session(gone)
        self.model.end_session(gone)

    @precondition(lambda self: self.model.records and not self.model.pending)
    @rule()
    def crash(self) -> None:
        """The owner dies between two calls; its table is all that is left of it."""
        for number in self.model.sessions:
            self.reading[number] = [
                ref
                for lease in self.model.leases.values()
                if lease.session == number
                for ref in lease.refs
            ]
            self.writing[number] = [
                (ref, part)
                for ref, record in sorted(self.model.records.items())
                for part, filler in record.open_parts.items()
                if filler == number
            ]
        entries = dict(sorted(self.table.entries.items()))
        before = self.tier.ready_keys()
        self.next_first_lease += 1000
        table = RecordedTable(dict(entries))
        self.tier = Tier(
            self.layout,
            regions(self.layout, SLOTS),
            table=table,
            first_lease=self.next_first_lease,
        )
        self.table = table
        left = [session(number) for number in sorted(self.model.sessions | self.model.pending)]
        assert self.tier.adopt(entries.items(), left) == len(before)
        self.model.crash(entries)

    @precondition(lambda self: self.model.pending)
    @rule(who=picks, pick=picks)
    def reattach(self, who: int, pick: int) -> None:
        known = sorted(self.model.pending)
        back = known[who % len(known)]
        # One part a session, as a rank has; the other one's slots were given up meanwhile.
        part = pick % self.model.num_parts
        writing = [ref for ref, mine in self.writing.get(back, []) if mine == part]
        reading = self.reading.get(back, [])
        lease = self.tier.reattach(session(back), reading=reading, writing=writing, part=part)
        assert (lease is None) == (not reading)
        self.model.reattach(back, lease, reading, writing, part)

    @invariant()
    def both_agree(self) -> None:
        self.tier.check()
        stats = self.tier.stats()
        model = self.model
        assert {k for _, k in self.tier.ready_keys()} == model.keys_in(ModelState.READY)
        assert stats.filling == model.count(ModelState.FILLING)
        assert stats.sealed == model.count(ModelState.SEALED)
        assert stats.ready == model.count(ModelState.READY) + model.count(ModelState.HIDDEN)
        assert stats.free == SLOTS - len(model.records)
        assert stats.leases == len(model.leases)
        assert set(self.tier.recovering()) == model.pending
        wakes = self.tier.drain().wakes
        assert {wake.waiter: wake.ready for wake in wakes} == model.wakes
        model.wakes = {}
        for slot in range(SLOTS):
            entry = self.table.entries.get(slot, self.tier.entry(slot))
            assert entry == self.tier.entry(slot), "the table must say what the tier decides"


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_abort_and_completion_in_every_order_free_a_slot_exactly_once(
    order: tuple[int, ...], sealed: bool, parts: int
) -> None:
    """R12: the owner's commit, its abort and its process's end, in each order."""
    layout = plain_layout(num_stages=parts)
    tier = Tier(layout, regions(layout, 2))
    tier.open_session(session(1))
    tier.open_session(session(2))
    found = tier.reserve([key(1)], 1, fillers=(1, 2)[:parts])
    assert found is not None
    refs = refs_of(found.fills)

    def commit() -> None:
        tier.commit(refs, 1)

    def abort() -> None:
        tier.abort(refs, 1, sealed=sealed)

    def end() -> None:
        tier.end_session(1)

    for step in order:
        # Who comes too late is refused by name; what matters here is what happens to the slot.
        with contextlib.suppress(StaleSlot):
            (commit, abort, end)[step]()
        tier.check()
    if parts == 2:
        tier.commit(refs, 2, part=1)
        tier.check()
    completed_first = order[0] == 0
    assert tier.doubt([key(1)]) == completed_first
    assert tier.stats().free == 2
