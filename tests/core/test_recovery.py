"""A second life of the owner: what is whole is kept, what may be in use is nobody else's."""

from __future__ import annotations

import pytest

from rayhicache.core.layout import RecordLayout
from rayhicache.core.slots import SlotRef, SlotState
from rayhicache.core.tier import Tier
from rayhicache.errors import SessionEnded, StaleSlot
from tiers import (
    RecordedTable,
    key,
    keys,
    new_tier,
    plain_layout,
    ready,
    refs_of,
    regions,
    reserved,
    session,
    store,
)

LAYOUT = plain_layout()


def next_life(
    table: RecordedTable,
    *,
    num_slots: int = 4,
    left: tuple[int, ...] = (1, 2),
    layout: RecordLayout = LAYOUT,
) -> Tier:
    """The owner was killed: only its table is left, and the processes `left` are alive."""
    tier = Tier(layout, regions(layout, num_slots), table=table, first_lease=1001)
    tier.adopt(sorted(table.entries.items()), [session(number) for number in left])
    tier.check()
    return tier


def test_ready_records_are_found_at_once_and_marked_unverified() -> None:
    table = RecordedTable()
    store(new_tier(table=table), 1, 2)
    tier = next_life(table)
    assert ready(tier) == {key(1), key(2)}
    tier.reattach(session(1), reading=[], writing=[])
    lease = tier.lookup(keys(1, 2), 1, now=0.0).lease
    assert lease is not None
    assert set(tier.unverified(lease.refs())) == set(lease.refs())
    tier.verified(lease.refs()[:1])
    assert tier.unverified(lease.refs()) == tuple(lease.refs()[1:])


def test_nothing_adopted_is_evicted_before_every_process_has_told_what_it_reads() -> None:
    table = RecordedTable()
    store(new_tier(num_slots=2, table=table), 1, 2)
    tier = next_life(table, num_slots=2)
    tier.reattach(session(1), reading=[], writing=[])
    assert tier.recovering() == (2,)
    assert tier.reserve(keys(8, 9), 1) is None
    tier.end_session(2)
    assert tier.recovering() == ()
    assert tier.reserve(keys(8, 9), 1) is not None


def test_nothing_adopted_is_freed_by_a_doubt_before_that() -> None:
    table = RecordedTable()
    store(new_tier(num_slots=1, table=table), 1)
    tier = next_life(table, num_slots=1)
    tier.reattach(session(1), reading=[], writing=[])
    tier.doubt(keys(1))
    assert tier.reserve(keys(2), 1) is None
    tier.end_session(2)
    assert tier.reserve(keys(2), 1) is not None


def test_what_a_process_still_reads_stays_until_it_releases_its_new_lease() -> None:
    table = RecordedTable()
    old = new_tier(num_slots=1, table=table)
    store(old, 1)
    lease = old.lookup(keys(1), 1, now=0.0).lease
    assert lease is not None
    tier = next_life(table, num_slots=1)
    again = tier.reattach(session(1), reading=lease.refs(), writing=[])
    tier.end_session(2)
    assert again is not None
    assert tier.reserve(keys(2), 1) is None
    tier.release(again)
    assert tier.reserve(keys(2), 1) is not None


def test_a_doubted_record_that_is_leased_is_held_for_its_reader_and_found_by_nobody() -> None:
    table = RecordedTable()
    old = new_tier(num_slots=2, table=table)
    store(old, 1)
    lease = old.lookup(keys(1), 1, now=0.0).lease
    assert lease is not None
    old.doubt(keys(1))
    store(old, 1)
    tier = next_life(table, num_slots=2)
    assert ready(tier) == {key(1)}
    again = tier.reattach(session(1), reading=lease.refs(), writing=[])
    tier.end_session(2)
    assert again is not None
    assert tier.entry(lease.refs()[0].slot).state is SlotState.READY
    assert tier.lookup(keys(1), 1, now=0.0).best == 1
    assert tier.reserve(keys(2), 1) is None
    tier.release(again)
    tier.check()
    assert tier.stats().free == 1


def test_a_slot_that_was_being_filled_is_nobodys_until_its_writer_has_unsealed_it() -> None:
    table = RecordedTable()
    refs = reserved(new_tier(num_slots=1, table=table), 1)
    tier = next_life(table, num_slots=1)
    tier.reattach(session(1), reading=[], writing=refs)
    tier.end_session(2)
    assert tier.stats().sealed == 1
    assert tier.reserve(keys(2), 1) is None
    tier.unseal(refs, 1)
    tier.check()
    assert tier.stats().free == 1
    with pytest.raises(StaleSlot):
        tier.unseal(refs, 1)


def test_a_slot_that_nobody_names_is_freed_when_the_last_process_has_told() -> None:
    table = RecordedTable()
    reserved(new_tier(num_slots=2, table=table), 1, 2)
    tier = next_life(table, num_slots=2)
    tier.reattach(session(1), reading=[], writing=[])
    assert tier.stats().sealed == 2
    tier.reattach(session(2), reading=[], writing=[])
    tier.check()
    assert tier.stats().free == 2


def test_a_record_of_two_writers_stays_sealed_until_both_have_passed() -> None:
    table = RecordedTable()
    layout = plain_layout(num_stages=2)
    found = new_tier(layout, table=table).reserve(keys(1), 1, fillers=(1, 2))
    assert found is not None
    refs = refs_of(found.fills)
    tier = next_life(table, layout=layout)
    tier.reattach(session(1), reading=[], writing=refs, part=0)
    tier.reattach(session(2), reading=[], writing=refs, part=1)
    tier.unseal(refs, 2, part=1)
    assert tier.stats().sealed == 1
    tier.commit(refs, 1, part=0)
    assert tier.stats().free == 4


def test_an_unsealed_slot_waits_for_processes_that_may_read_it() -> None:
    """A process may read the verified layer groups of a slot that its puller is filling."""
    table = RecordedTable()
    refs = reserved(new_tier(num_slots=1, table=table), 1)
    tier = next_life(table, num_slots=1)
    tier.reattach(session(1), reading=[], writing=refs)
    tier.unseal(refs, 1)
    tier.check()
    assert tier.reserve(keys(2), 1) is None
    lease = tier.reattach(session(2), reading=refs, writing=[])
    assert lease is not None
    assert tier.reserve(keys(2), 1) is None
    assert ready(tier) == set()
    tier.release(lease)
    tier.check()
    assert tier.stats().free == 1


def test_a_lost_answer_to_a_reattach_leaves_one_lease() -> None:
    table = RecordedTable()
    old = new_tier(table=table)
    store(old, 1)
    lease = old.lookup(keys(1), 1, now=0.0).lease
    assert lease is not None
    tier = next_life(table)
    first = tier.reattach(session(1), reading=lease.refs(), writing=[])
    second = tier.reattach(session(1), reading=lease.refs(), writing=[])
    assert second not in (first, None)
    assert tier.stats().leases == 1
    tier.check()


def test_a_process_that_dies_before_it_re_attaches_holds_up_nobody() -> None:
    table = RecordedTable()
    old = new_tier(table=table)
    store(old, 1)
    reserved(old, 2, by=2)
    tier = next_life(table)
    with pytest.raises(SessionEnded):
        tier.lookup(keys(1), 1, now=0.0)
    tier.end_session(1)
    tier.end_session(2)
    tier.check()
    assert (tier.stats().free, tier.stats().ready) == (3, 1)


def test_without_processes_left_recovery_is_over_at_once() -> None:
    table = RecordedTable()
    old = new_tier(table=table)
    store(old, 1)
    reserved(old, 2)
    tier = next_life(table, left=())
    assert tier.recovering() == ()
    assert (tier.stats().free, tier.stats().ready) == (3, 1)


def test_generations_go_on_so_a_reference_of_the_earlier_life_stays_stale() -> None:
    table = RecordedTable()
    old = new_tier(num_slots=1, table=table)
    refs = reserved(old, 1)
    old.abort(refs, 1)
    tier = next_life(table, num_slots=1, left=())
    tier.open_session(session(1))
    (new,) = reserved(tier, 2)
    assert new == SlotRef(refs[0].slot, refs[0].generation + 1)
    assert tier.reattach(session(1), reading=refs, writing=refs) is None


def test_two_crashes_in_a_row_still_hold_what_the_first_life_lent() -> None:
    table = RecordedTable()
    old = new_tier(num_slots=2, table=table)
    store(old, 1)
    writing = reserved(old, 2)
    next_life(table, num_slots=2)
    tier = next_life(table, num_slots=2)
    assert ready(tier) == {key(1)}
    tier.reattach(session(1), reading=[], writing=writing)
    tier.reattach(session(2), reading=[], writing=[])
    assert tier.stats().sealed == 1
    tier.unseal(writing, 1)
    assert tier.stats().free == 1
