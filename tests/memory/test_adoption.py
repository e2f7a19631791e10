"""From one life of the owner to the next, by kill -9 (R23, R29) and with damaged records."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arenas import (
    SEAT,
    TIER,
    Bystander,
    OwnerProcess,
    content,
    digests_of,
    eventually,
    files_under,
    fill,
    key,
    keys,
    open_arena,
    open_owner,
    plain_layout,
    record_bytes,
    session_of,
    store,
    wrong_pages,
)
from rayhicache.core.slots import SlotRef, SlotState
from rayhicache.errors import ArenaError, SessionEnded
from rayhicache.memory import format as fmt
from rayhicache.memory.owner import AdoptedRecord, ArenaOwner
from rayhicache.memory.process import this_process


def refs(told: list[list[int]]) -> list[SlotRef]:
    return [SlotRef(*each) for each in told]


def take_all_room(owner: ArenaOwner) -> int:
    """Store new pages one by one until there is no room that isn't held; how many fitted."""
    session = owner.attach(plain_layout(), this_process("greedy")).session
    taken = []
    for number in range(1000, 1000 + owner.stats().slots + 1):
        reserved = owner.reserve(keys(number), session)
        if reserved is None:
            break
        taken += fill(owner, reserved)
    owner.abort(taken, session)
    owner.detach(session)
    owner.check()
    return len(taken)


# ── kill -9 ─────────────────────────────────────────────────────────────────────────────────


def test_five_kills_in_a_row_leave_one_file_and_only_whole_records(root: Path) -> None:
    stored = 0
    for life in range(1, 6):
        victim = OwnerProcess(root, "churn", str(life * 1000))
        # More than fit, so that it is killed while it evicts, fills and commits.
        for _ in range(40):
            stored = victim.tells()["stored"]
        for unheard in victim.kill():
            stored = unheard["stored"]
        assert list(files_under(root)) == [f"{TIER}/{SEAT}.arena"]
        assert sum(files_under(root).values()) == open_size(root)
    owner = open_owner(root)
    assert owner.epoch == 6
    assert owner.recovering() == ()
    owner.check()
    stats = owner.stats()
    assert (stats.filling, stats.sealed) == (0, 0)
    found = [page for _, page in owner.ready_keys()]
    assert len(found) >= stats.slots - 1, "at most the record under way is lost"
    assert key(stored) in found
    session = owner.attach(plain_layout(), this_process()).session
    assert wrong_pages(owner, session, found) == []
    owner.close(unlink=True)
    assert not root.exists()


def open_size(root: Path) -> int:
    return (root / TIER / f"{SEAT}.arena").stat().st_size


def held_by_this_process(root: Path) -> dict[str, Any]:
    """An owner was killed while this process had a lease on page 1 and was filling page 9."""
    victim = OwnerProcess(root, "hold", str(os.getpid()))
    told = victim.tells()
    victim.kill()
    return told


def test_a_restarted_owner_gives_nobody_the_slots_of_a_live_process(root: Path) -> None:
    """R29: whatever is stored meanwhile, the lease's bytes stay and the filling isn't overrun."""
    told = held_by_this_process(root)
    (reading,), (writing,) = refs(told["reading"]), refs(told["writing"])
    owner = open_owner(root)
    assert owner.recovering() == (told["session"],)
    nbytes = record_bytes(owner)
    late = content(key(9), nbytes)
    owner.view(writing, 0, nbytes)[:] = late

    slots = owner.stats().slots
    assert take_all_room(owner) == slots - 4, "nothing adopted is evicted, nothing sealed is given"
    again = owner.reattach(told["session"], this_process(), reading=[reading], writing=[writing])
    assert again.attachment.epoch == 2
    assert owner.recovering() == ()
    assert take_all_room(owner) == slots - 2, "only what it named is still held"
    assert owner.view(reading, 0, nbytes) == content(key(1), nbytes)
    assert owner.view(writing, 0, nbytes) == late

    owner.release(told["lease"])
    assert owner.stats().leases == 1, "a lease of an earlier life ends silently"
    assert again.lease is not None
    owner.release(again.lease)
    owner.unseal([writing], told["session"])
    assert take_all_room(owner) == slots
    owner.close(unlink=True)


def test_a_filling_of_an_earlier_life_can_be_committed_and_is_lost(root: Path) -> None:
    told = held_by_this_process(root)
    owner = open_owner(root)
    writing = refs(told["writing"])
    owner.reattach(told["session"], this_process(), reading=(), writing=writing)
    assert owner.commit(writing, told["session"]) == 0
    assert owner.stats().sealed == 0
    owner.check()
    owner.close(unlink=True)


def test_slots_of_a_process_that_dies_without_returning_are_freed_at_its_end(
    root: Path, bystander: Callable[[], Bystander]
) -> None:
    worker = bystander()
    victim = OwnerProcess(root, "hold", str(worker.process.pid))
    told = victim.tells()
    victim.kill()
    owner = open_owner(root)
    slots = owner.stats().slots
    assert owner.recovering() == (told["session"],)
    assert take_all_room(owner) == slots - 4
    worker.kill()
    assert eventually(lambda: owner.recovering() == ())
    assert take_all_room(owner) == slots
    owner.close(unlink=True)


def test_a_process_that_died_with_the_owner_is_not_waited_for(
    root: Path, bystander: Callable[[], Bystander]
) -> None:
    worker = bystander()
    victim = OwnerProcess(root, "hold", str(worker.process.pid))
    victim.tells()
    victim.kill()
    worker.kill()
    owner = open_owner(root)
    assert owner.recovering() == ()
    assert {page for _, page in owner.ready_keys()} == set(keys(1, 2, 3))
    assert owner.stats().sealed == 0
    owner.close(unlink=True)


def test_a_later_process_with_the_same_pid_is_not_waited_for(root: Path) -> None:
    owner = open_owner(root)
    owner.attach(plain_layout(), this_process())
    owner.close(unlink=False)
    arena = open_arena(root)
    (session,) = arena.sessions()
    arena.remove_session(session.id)
    arena.add_session(replace(session, start_time=session.start_time - 1))
    arena.close()
    owner = open_owner(root)
    assert owner.recovering() == ()
    owner.close(unlink=True)


def test_a_session_goes_on_only_for_its_own_process_and_only_if_it_is_known(root: Path) -> None:
    told = held_by_this_process(root)
    owner = open_owner(root)
    me = this_process()
    with pytest.raises(SessionEnded, match="was opened by pid"):
        owner.reattach(told["session"], replace(me, pid=1), reading=(), writing=())
    with pytest.raises(SessionEnded, match="isn't in the arena's table"):
        owner.reattach(told["session"] + 1, me, reading=(), writing=())
    owner.reattach(told["session"], me, reading=(), writing=())
    owner.detach(told["session"])
    with pytest.raises(SessionEnded):
        owner.reattach(told["session"], me, reading=(), writing=())
    owner.close(unlink=True)


def test_an_answer_that_was_lost_is_given_again_with_one_lease(root: Path) -> None:
    told = held_by_this_process(root)
    owner = open_owner(root)
    reading = refs(told["reading"])
    for _ in range(2):
        again = owner.reattach(told["session"], this_process(), reading=reading, writing=())
    assert owner.stats().leases == 1
    assert again.lease is not None
    owner.release(again.lease)
    owner.check()
    owner.close(unlink=True)


def test_a_detached_process_is_not_waited_for(root: Path) -> None:
    owner = open_owner(root)
    owner.detach(owner.attach(plain_layout(), this_process()).session)
    owner.close(unlink=False)
    owner = open_owner(root)
    assert owner.recovering() == ()
    owner.close(unlink=True)


def test_attached_processes_of_another_pid_namespace_stop_an_adoption(root: Path) -> None:
    open_owner(root).close(unlink=False)
    arena = open_arena(root)
    me = this_process("elsewhere")
    arena.add_session(session_of(replace(me, pid_namespace=me.pid_namespace + 1), 5))
    with pytest.raises(ArenaError, match="elsewhere") as refusal:
        ArenaOwner(arena)
    assert "rayhicache down tier" in refusal.value.remedy
    arena.close()


def test_closing_without_unlinking_leaves_the_file_as_a_crash_does(root: Path) -> None:
    owner = open_owner(root)
    session = owner.attach(plain_layout(), this_process()).session
    store(owner, session, keys(1))
    owner.reserve(keys(2), session)
    path = root / TIER / f"{SEAT}.arena"
    before = path.read_bytes()
    owner.close(unlink=False)
    assert path.read_bytes() == before
    open_owner(root).close(unlink=True)


# ── damaged records ─────────────────────────────────────────────────────────────────────────


def stored_and_closed(root: Path, *numbers: int) -> list[SlotRef]:
    owner = open_owner(root)
    session = owner.attach(plain_layout(), this_process()).session
    stored = store(owner, session, keys(*numbers))
    owner.detach(session)
    owner.close(unlink=False)
    return stored


def test_a_record_whose_entry_is_damaged_is_not_found_and_its_slot_comes_back(
    root: Path,
) -> None:
    stored = stored_and_closed(root, 1, 2, 3)
    with (root / TIER / f"{SEAT}.arena").open("r+b") as file:
        file.seek(fmt.TABLE_OFFSET + stored[1].slot * fmt.ENTRY_BYTES + 50)
        file.write(b"\xff\xff")
    arena = open_arena(root)
    assert dict(arena.entries())[stored[1].slot].state is SlotState.SEALED
    arena.close()
    owner = open_owner(root)
    assert {page for _, page in owner.ready_keys()} == set(keys(1, 3))
    assert owner.stats().sealed == 0
    owner.check()
    owner.close(unlink=True)


class Verifier:
    """Checks digests, and counts by key how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def __call__(self, record: AdoptedRecord) -> bool:
        self.asked.append(record.key)
        assert record.group == "full"
        return record.digests == digests_of(record.data)


def test_an_adopted_record_with_other_bytes_is_never_answered(root: Path) -> None:
    stored = stored_and_closed(root, 1, 2, 3)
    arena = open_arena(root)
    arena.view(stored[1].slot, 100, 1)[:] = b"?"
    arena.close()
    verify = Verifier()
    owner = open_owner(root, verify=verify)
    session = owner.attach(plain_layout(), this_process()).session
    hit = owner.lookup(keys(1, 2, 3), session)
    assert hit.best == 1
    assert sorted(verify.asked) == sorted(keys(1, 2, 3))
    assert {page for _, page in owner.ready_keys()} == set(keys(1, 3))
    assert owner.stats().leases == 1
    owner.lookup(keys(1, 2, 3), session)
    assert len(verify.asked) == 3, "each record is verified once"
    owner.check()
    owner.close(unlink=True)


def test_records_of_this_life_are_not_verified(root: Path) -> None:
    verify = Verifier()
    owner = open_owner(root, verify=verify)
    session = owner.attach(plain_layout(), this_process()).session
    store(owner, session, keys(1))
    assert owner.lookup(keys(1), session).best == 1
    assert verify.asked == []
    owner.close(unlink=True)


def test_a_session_that_ends_while_its_records_are_verified_leaves_no_lease(root: Path) -> None:
    stored_and_closed(root, 1)

    def ends_meanwhile(record: AdoptedRecord) -> bool:
        owner.detach(session)
        return False

    owner = open_owner(root, verify=ends_meanwhile)
    session = owner.attach(plain_layout(), this_process()).session
    with pytest.raises(SessionEnded):
        owner.lookup(keys(1), session)
    assert owner.stats().leases == 0
    owner.check()
    owner.close(unlink=True)
