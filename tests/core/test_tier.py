"""What the tier promises, one sentence a test."""

from __future__ import annotations

import pytest

from rayhicache.core.slots import SlotRef, SlotState
from rayhicache.errors import InvalidRequest, SessionEnded, StaleSlot, UnknownLease
from tiers import (
    RecordedTable,
    hybrid_layout,
    key,
    keys,
    new_tier,
    plain_layout,
    ready,
    refs_of,
    reserved,
    session,
    store,
)


def test_a_page_is_invisible_until_it_is_committed() -> None:
    tier = new_tier()
    refs = reserved(tier, 1, 2)
    assert tier.lookup(keys(1, 2), 2, now=0.0).lease is None
    tier.commit(refs[:1], 1)
    assert list(tier.lookup(keys(1, 2), 2, now=0.0).lengths) == [1]


def test_an_event_follows_the_commit_and_never_precedes_it() -> None:
    tier = new_tier()
    refs = reserved(tier, 1)
    assert tier.drain().stored == ()
    tier.commit(refs, 1)
    assert tier.drain().stored == (("full", key(1)),)
    assert tier.drain().stored == ()


def test_a_leased_page_is_never_evicted() -> None:
    tier = new_tier(num_slots=2)
    store(tier, 1, 2)
    hit = tier.lookup(keys(1, 2), 2, now=0.0)
    assert hit.lease is not None
    assert tier.reserve(keys(5), 1) is None
    tier.release(hit.lease.id)
    assert tier.reserve(keys(5), 1) is not None
    assert ready(tier) == {key(1)}


def test_a_chunk_without_room_changes_nothing() -> None:
    tier = new_tier(num_slots=3)
    store(tier, 1, 2, 3)
    hit = tier.lookup(keys(1), 2, now=0.0)
    before = (tier.stats(), ready(tier))
    tier.drain()
    assert tier.reserve(keys(5, 6, 7), 1) is None
    assert (tier.stats(), ready(tier)) == before
    assert tier.drain().removed == ()
    assert hit.lease is not None


def test_a_chunk_evicts_neither_its_own_pages_nor_its_parent() -> None:
    tier = new_tier(num_slots=3)
    store(tier, 1, 2)
    store(tier, 9)
    found = tier.reserve(keys(2, 3), 1, parent=key(1))
    assert found is not None
    assert [fill.key for fill in found.fills] == keys(3)
    assert found.ready == (key(2),)
    assert ready(tier) == {key(1), key(2)}
    assert tier.reserve(keys(3, 4), 2, parent=key(2)) is None
    assert ready(tier) == {key(1), key(2)}


def test_a_key_is_filled_by_one_session_at_a_time() -> None:
    tier = new_tier()
    refs = reserved(tier, 1, by=1)
    second = tier.reserve(keys(1, 2), 2)
    assert second is not None
    assert second.filling == (key(1),)
    assert [fill.key for fill in second.fills] == keys(2)
    tier.commit(refs, 1)
    third = tier.reserve(keys(1, 2), 1)
    assert third is not None
    assert third.fills == ()
    assert (third.ready, third.filling) == ((key(1),), (key(2),))


def test_a_waiter_is_woken_when_all_that_it_waits_for_is_ready() -> None:
    tier = new_tier()
    refs = reserved(tier, 1, 2)
    waiter = tier.park(keys(1, 2), 2)
    tier.commit(refs[:1], 1)
    assert tier.drain().wakes == ()
    tier.commit(refs[1:], 1)
    assert [(wake.waiter, wake.ready) for wake in tier.drain().wakes] == [(waiter, True)]
    assert tier.park(keys(1, 2), 2) is None


@pytest.mark.parametrize("end", ["abort", "seal", "session"])
def test_an_abort_wakes_its_waiters_with_a_miss(end: str) -> None:
    tier = new_tier()
    refs = reserved(tier, 1, 2)
    waiter = tier.park(keys(1, 2), 2)
    if end == "session":
        tier.end_session(1)
    else:
        tier.abort(refs[1:], 1, sealed=end == "seal")
    assert [(wake.waiter, wake.ready) for wake in tier.drain().wakes] == [(waiter, False)]
    assert tier.park(keys(2), 2) is None


def test_a_waiter_that_gave_up_or_is_gone_is_not_woken() -> None:
    tier = new_tier(sessions=(1, 2, 3))
    refs = reserved(tier, 1)
    waiter = tier.park(keys(1), 2)
    assert waiter is not None
    assert tier.park(keys(1), 3) is not None
    tier.unpark(waiter)
    tier.end_session(3)
    tier.commit(refs, 1)
    assert tier.drain().wakes == ()


@pytest.mark.parametrize("stage", ["reserved", "sealed", "half", "ready", "leased"])
def test_giving_up_at_any_stage_leaves_every_slot_free(stage: str) -> None:
    """R16: the free count returns to the start, and nothing is left leased or waiting."""
    tier = new_tier(plain_layout(num_stages=2))
    free = tier.stats().free
    refs = reserved(tier, 1, 2)
    if stage == "sealed":
        tier.abort(refs, 1, sealed=True)
        assert tier.stats().sealed == 2
    if stage in ("half", "ready", "leased"):
        tier.commit(refs, 1, part=0)
    if stage in ("ready", "leased"):
        tier.commit(refs, 1, part=1)
    if stage == "leased":
        assert tier.lookup(keys(1, 2), 1, now=0.0).best == 2
    if stage == "half":
        tier.abort(refs, 1, part=1)
    tier.end_session(1)
    tier.doubt(keys(1, 2))
    tier.check()
    assert (tier.stats().free, tier.stats().leases) == (free, 0)


def test_a_lease_is_released_exactly_once() -> None:
    tier = new_tier()
    store(tier, 1)
    lease = tier.lookup(keys(1), 1, now=0.0).lease
    assert lease is not None
    tier.release(lease.id)
    with pytest.raises(UnknownLease, match=f"lease {lease.id}"):
        tier.release(lease.id)
    assert tier.stats().leased == 0


def test_a_slot_that_is_given_back_twice_is_freed_once_and_named() -> None:
    """R12."""
    tier = new_tier()
    refs = reserved(tier, 1)
    tier.abort(refs, 1)
    with pytest.raises(StaleSlot, match=f"slot {refs[0].slot} "):
        tier.abort(refs, 1)
    tier.check()


def test_a_slot_named_twice_in_one_call_is_refused_before_anything_changes() -> None:
    """R12."""
    tier = new_tier()
    first, second = reserved(tier, 1, 2)
    for call in (tier.abort, tier.commit):
        with pytest.raises(StaleSlot, match="named twice"):
            call([first, second, first], 1)
    assert tier.stats().filling == 2
    tier.check()


def test_a_reference_of_an_earlier_life_of_the_slot_is_stale() -> None:
    tier = new_tier(num_slots=1)
    old = reserved(tier, 1)
    tier.abort(old, 1)
    new = reserved(tier, 2)
    assert new[0].slot == old[0].slot
    with pytest.raises(StaleSlot, match="generation"):
        tier.commit(old, 1)
    with pytest.raises(StaleSlot, match="slots are"):
        tier.commit([SlotRef(99, 1)], 1)


def test_only_the_filler_may_commit_and_one_bad_reference_commits_nothing() -> None:
    tier = new_tier()
    mine, other = reserved(tier, 1, by=1), reserved(tier, 2, by=2)
    with pytest.raises(StaleSlot, match="session 1 doesn't fill"):
        tier.commit([*mine, *other], 1)
    assert ready(tier) == set()


def test_digests_that_do_not_fit_the_records_commit_nothing() -> None:
    tier = new_tier()
    refs = reserved(tier, 1, 2)
    for digests in ([(1, 2)], [(1, 2), (3,)], [(1, 2), (3, 4), (5, 6)]):
        with pytest.raises(InvalidRequest, match="2 records"):
            tier.commit(refs, 1, digests=digests)
    assert tier.stats().filling == 2
    assert tier.commit(refs, 1, digests=[(1, 2), (3, 4)]) == 2


def test_a_record_is_ready_when_all_its_parts_are_there_and_has_the_sum_of_their_digests() -> None:
    tier = new_tier(plain_layout(num_stages=2))
    found = tier.reserve(keys(1), 1, fillers=(1, 2))
    assert found is not None
    refs = refs_of(found.fills)
    assert tier.commit(refs, 2, part=1, digests=[(2**64 - 1, 5)]) == 0
    assert ready(tier) == set()
    with pytest.raises(StaleSlot, match="part 1"):
        tier.commit(refs, 2, part=1)
    assert tier.commit(refs, 1, part=0, digests=[(2, 6)]) == 1
    assert tier.entry(refs[0].slot).digests == (1, 11)


def test_a_part_that_is_given_up_seals_the_record_until_the_others_have_passed() -> None:
    tier = new_tier(plain_layout(num_stages=2))
    found = tier.reserve(keys(1), 1, fillers=(1, 2))
    assert found is not None
    refs = refs_of(found.fills)
    tier.abort(refs, 1, part=0)
    assert tier.stats().sealed == 1
    assert tier.commit(refs, 2, part=1) == 0
    assert (tier.stats().free, ready(tier)) == (4, set())


def test_the_end_of_a_writer_keeps_the_part_that_it_had_committed() -> None:
    tier = new_tier(plain_layout(num_stages=2))
    found = tier.reserve(keys(1), 1, fillers=(1, 2))
    assert found is not None
    refs = refs_of(found.fills)
    tier.commit(refs, 1, part=0)
    tier.end_session(1)
    tier.commit(refs, 2, part=1)
    assert ready(tier) == {key(1)}


def test_a_sealed_slot_is_nobodys_until_its_copies_can_land_no_more() -> None:
    tier = new_tier(num_slots=1)
    refs = reserved(tier, 1)
    with pytest.raises(StaleSlot, match="not sealed"):
        tier.unseal(refs, 1)
    tier.abort(refs, 1, sealed=True)
    assert tier.reserve(keys(2), 2) is None
    tier.unseal(refs, 1)
    assert tier.reserve(keys(2), 2) is not None


def test_after_one_failed_load_the_lookup_says_miss() -> None:
    """R36."""
    tier = new_tier(num_slots=2)
    store(tier, 1, 2)
    assert tier.doubt(keys(2)) == 1
    assert tier.lookup(keys(1, 2), 1, now=0.0).best == 1
    assert tier.drain().removed == (("full", key(2)),)
    assert tier.doubt(keys(2)) == 0


def test_a_doubted_page_stays_for_its_readers_and_can_be_stored_anew() -> None:
    tier = new_tier(num_slots=2)
    store(tier, 1)
    lease = tier.lookup(keys(1), 2, now=0.0).lease
    assert lease is not None
    tier.doubt(keys(1))
    assert tier.lookup(keys(1), 1, now=0.0).best == 0
    store(tier, 1)
    assert tier.stats().free == 0
    tier.release(lease.id)
    assert tier.stats().free == 1
    assert tier.lookup(keys(1), 1, now=0.0).best == 1


def test_a_lease_of_a_remote_reader_ends_at_its_deadline() -> None:
    tier = new_tier()
    store(tier, 1)
    remote = tier.lookup(keys(1), 1, now=10.0, lease_seconds=5.0).lease
    local = tier.lookup(keys(1), 2, now=10.0).lease
    assert remote is not None
    assert local is not None
    assert tier.expire(14.9) == 0
    assert tier.expire(15.0) == 1
    assert (tier.lease(remote.id), tier.lease(local.id)) == (None, local)
    with pytest.raises(UnknownLease):
        tier.release(remote.id)


def test_a_session_that_has_ended_can_do_nothing_more() -> None:
    tier = new_tier()
    tier.end_session(1)
    tier.end_session(1)
    with pytest.raises(SessionEnded):
        tier.lookup(keys(1), 1, now=0.0)
    with pytest.raises(SessionEnded):
        tier.reserve(keys(1), 2, fillers=(1,))
    with pytest.raises(SessionEnded):
        tier.park(keys(1), 1)


def test_five_pages_may_be_restorable_while_four_are_not() -> None:
    tier = new_tier(hybrid_layout(), num_slots=6)
    store(tier, 1, 2, 3, 4, 5)
    store(tier, 1, 2, 3, 4, 5, group="window")
    store(tier, 2, group="state")
    store(tier, 5, group="state")
    hit = tier.lookup(keys(1, 2, 3, 4, 5, 6), 1, now=0.0)
    assert list(hit.lengths) == [2, 5]
    assert hit.lease is not None
    assert set(hit.lease.records["full"]) == {0, 1, 2, 3, 4}
    assert set(hit.lease.records["window"]) == {0, 1, 3, 4}
    assert set(hit.lease.records["state"]) == {1, 4}


def test_the_table_turns_ready_only_with_the_last_commit() -> None:
    table = RecordedTable()
    tier = new_tier(plain_layout(num_stages=2), table=table)
    found = tier.reserve(keys(1), 1, fillers=(1, 2))
    assert found is not None
    (ref,) = refs_of(found.fills)
    seen = [table.entries[ref.slot].state]
    for part in (0, 1):
        tier.commit([ref], part + 1, part=part)
        seen.append(table.entries[ref.slot].state)
    assert seen == [SlotState.FILLING, SlotState.FILLING, SlotState.READY]
    assert session(1) in tier.sessions()
