"""The owner: sessions, leases and fillings of many processes, and nothing that stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from arenas import Bystander, attach, eventually, fill, keys, open_owner, plain_layout, store
from rayhicache.core.outcomes import Effects
from rayhicache.core.slots import SlotRef
from rayhicache.errors import (
    ArenaError,
    InvalidRequest,
    SessionEnded,
    StaleSlot,
    TierClosed,
    UnknownLease,
)
from rayhicache.memory import format as fmt
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.process import this_process

LONG = 30.0


def test_before_the_first_attach_an_owner_holds_only_capacity(root: Path) -> None:
    owner = open_owner(root)
    assert owner.layout is None
    assert owner.capacity_bytes > 0
    assert owner.stats().slots == 0
    assert (owner.sessions(), owner.recovering(), owner.ready_keys()) == ((), (), [])
    assert owner.count_present(keys(1)) == 0
    with pytest.raises(SessionEnded, match="nobody has attached"):
        owner.lookup(keys(1), 1)
    owner.close(unlink=True)
    assert not root.exists()


def test_what_one_session_stored_another_one_reads(root: Path) -> None:
    owner = open_owner(root)
    writer, reader = attach(owner), attach(owner)
    store(owner, writer, keys(1, 2))
    hit = owner.lookup(keys(1, 2, 3), reader)
    assert hit.best == 2
    assert hit.lease is not None
    owner.release(hit.lease.id)
    owner.check()
    owner.close(unlink=True)


def test_sessions_have_different_ids_in_all_lives(root: Path) -> None:
    first = open_owner(root)
    ids = {attach(first), attach(first)}
    first.close(unlink=False)
    second = open_owner(root)
    ids |= {attach(second)}
    assert len(ids) == 3
    second.close(unlink=True)


def test_a_process_of_another_pid_namespace_is_refused(root: Path) -> None:
    owner = open_owner(root)
    me = this_process("elsewhere")
    with pytest.raises(InvalidRequest, match="pid namespace"):
        owner.attach(plain_layout(), replace(me, pid_namespace=me.pid_namespace + 1))
    assert owner.layout is None
    owner.close(unlink=True)


def test_a_process_that_is_gone_already_is_refused(
    root: Path, bystander: Callable[[], Bystander]
) -> None:
    owner = open_owner(root)
    other = bystander()
    identity = other.identity
    other.kill()
    with pytest.raises(SessionEnded, match="is gone"):
        owner.attach(plain_layout(), identity)
    assert owner.sessions() == ()
    owner.close(unlink=True)


def test_a_full_attachment_table_refuses_and_takes_again_after_a_detach(root: Path) -> None:
    owner = open_owner(root)
    sessions = [attach(owner) for _ in range(fmt.SESSIONS_MAX)]
    with pytest.raises(ArenaError, match="256 processes"):
        attach(owner)
    owner.detach(sessions[7])
    attach(owner)
    owner.check()
    owner.close(unlink=True)


# ── R12: nothing is freed twice ─────────────────────────────────────────────────────────────


def test_a_second_release_raises_and_names_the_lease(root: Path) -> None:
    owner = open_owner(root)
    session = attach(owner)
    store(owner, session, keys(1))
    lease = owner.lookup(keys(1), session).lease
    assert lease is not None
    owner.release(lease.id)
    with pytest.raises(UnknownLease, match=str(lease.id)):
        owner.release(lease.id)
    owner.check()
    owner.close(unlink=True)


Step = Callable[[ArenaOwner, list[SlotRef], int], object]


def commit(owner: ArenaOwner, refs: list[SlotRef], session: int) -> object:
    return owner.commit(refs, session)


def abort(owner: ArenaOwner, refs: list[SlotRef], session: int) -> object:
    owner.abort(refs, session)
    return None


@pytest.mark.parametrize("first", [commit, abort])
@pytest.mark.parametrize("second", [commit, abort])
def test_a_filling_ends_once_whichever_of_commit_and_abort_comes_first(
    root: Path, first: Step, second: Step
) -> None:
    owner = open_owner(root)
    session = attach(owner)
    free = owner.stats().free
    refs = fill(owner, owner.reserve(keys(1), session))
    first(owner, refs, session)
    with pytest.raises(StaleSlot):
        second(owner, refs, session)
    owner.check()
    owner.doubt(keys(1))
    assert owner.stats().free == free
    owner.close(unlink=True)


# ── R16: an end at any stage leaves no slot behind ──────────────────────────────────────────


def after_reserve(owner: ArenaOwner, session: int) -> None:
    owner.reserve(keys(1, 2), session)


def after_sealing(owner: ArenaOwner, session: int) -> None:
    reserved = owner.reserve(keys(1, 2), session)
    assert reserved is not None
    owner.abort([each.ref for each in reserved.fills], session, sealed=True)


def after_half_a_commit(owner: ArenaOwner, session: int) -> None:
    owner.commit(fill(owner, owner.reserve(keys(1, 2), session))[:1], session)


def under_a_lease(owner: ArenaOwner, session: int) -> None:
    store(owner, session, keys(1, 2))
    owner.lookup(keys(1, 2), session)


def under_a_lease_on_doubted_records(owner: ArenaOwner, session: int) -> None:
    under_a_lease(owner, session)
    owner.doubt(keys(1))


STAGES = [
    after_reserve,
    after_sealing,
    after_half_a_commit,
    under_a_lease,
    under_a_lease_on_doubted_records,
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("killed", [False, True], ids=["detached", "killed"])
def test_a_session_that_ends_at_any_stage_holds_nothing_any_more(
    root: Path,
    bystander: Callable[[], Bystander],
    stage: Callable[[ArenaOwner, int], None],
    killed: bool,
) -> None:
    owner = open_owner(root)
    attach(owner)
    before = owner.stats()
    other = bystander()
    session = owner.attach(plain_layout(), other.identity).session
    stage(owner, session)
    if killed:
        other.kill()
        assert eventually(lambda: len(owner.sessions()) == 1)
    else:
        owner.detach(session)
        owner.detach(session)
    owner.check()
    after = owner.stats()
    assert (after.leased, after.filling, after.sealed) == (0, 0, 0)
    owner.doubt(keys(1, 2))
    assert owner.stats().free == before.free
    with pytest.raises(SessionEnded):
        owner.lookup(keys(1), session)
    owner.close(unlink=True)


def test_a_sealed_slot_is_nobodys_until_it_is_unsealed(root: Path) -> None:
    owner = open_owner(root)
    session = attach(owner)
    after_sealing(owner, session)
    sealed = owner.stats().sealed
    assert sealed == 2
    everything = keys(*range(10, 10 + owner.stats().slots - sealed))
    assert owner.reserve([*everything, *keys(99)], session) is None
    assert owner.reserve(everything, session) is not None
    owner.close(unlink=True)


# ── R15: without any traffic ────────────────────────────────────────────────────────────────


def test_a_lease_with_a_deadline_ends_without_any_call(root: Path) -> None:
    seconds = [0.0]
    owner = open_owner(root, clock=lambda: seconds[0])
    session = attach(owner)
    store(owner, session, keys(1))
    owner.lookup(keys(1), session, lease_seconds=5)
    owner.lookup(keys(1), session)
    assert owner.stats().leases == 2
    seconds[0] = 5.0
    # `stats` only looks: it is the watcher's thread that ends the lease.
    assert eventually(lambda: owner.stats().leases == 1)
    owner.close(unlink=True)


# ── effects ─────────────────────────────────────────────────────────────────────────────────


def test_effects_are_told_in_order_and_a_subscriber_may_call_the_owner(root: Path) -> None:
    owner = open_owner(root)
    session = attach(owner)
    told: list[tuple[str, bytes]] = []

    def subscriber(effects: Effects) -> None:
        for _, key in effects.stored:
            assert owner.count_present([key]) == 1, "told after the fact"
            told.append(("stored", key))
            owner.doubt([key])
        told.extend(("removed", key) for _, key in effects.removed)

    owner.subscribe(subscriber)
    (one,), (two,) = keys(1), keys(2)
    store(owner, session, [one])
    store(owner, session, [two])
    assert told == [("stored", one), ("removed", one), ("stored", two), ("removed", two)]
    owner.close(unlink=True)


def test_effects_of_many_threads_replayed_give_the_index(root: Path) -> None:
    owner = open_owner(root)
    session = attach(owner)
    index: set[bytes] = set()

    def replay(effects: Effects) -> None:
        index.difference_update(key for _, key in effects.removed)
        index.update(key for _, key in effects.stored)

    owner.subscribe(replay)
    start = threading.Barrier(4)

    def churn(seed: int) -> None:
        start.wait(LONG)
        for number in range(seed, seed + 60):
            store(owner, session, keys(number))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(churn, 1000 * number) for number in range(4)]:
            done.result(LONG)
    assert index == {key for _, key in owner.ready_keys()}
    assert owner.stats().evicted_pages > 0
    owner.check()
    owner.close(unlink=True)


# ── the rest ────────────────────────────────────────────────────────────────────────────────


def test_a_view_needs_the_slots_present_life(root: Path) -> None:
    owner = open_owner(root)
    session = attach(owner)
    (ref,) = store(owner, session, keys(1))
    owner.view(ref, 0, 16)
    for wrong in (ref._replace(generation=ref.generation + 1), SlotRef(10**6, 1), SlotRef(-1, 1)):
        with pytest.raises(StaleSlot):
            owner.view(wrong, 0, 16)
    owner.doubt(keys(1))
    with pytest.raises(StaleSlot, match="FREE"):
        owner.view(ref, 0, 16)
    owner.close(unlink=True)


def test_a_closed_owner_refuses_and_closes_once(root: Path) -> None:
    owner = open_owner(root)
    session = attach(owner)
    owner.close(unlink=True)
    owner.close(unlink=True)
    assert not root.exists()
    for call in (
        lambda: owner.lookup(keys(1), session),
        lambda: owner.reserve(keys(1), session),
        lambda: attach(owner),
    ):
        with pytest.raises(TierClosed):
            call()
    owner.detach(session)
