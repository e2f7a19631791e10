"""Only what is dead is removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from arenas import SEAT, TIER, Bystander, open_arena, open_owner, plain_layout
from rayhicache.memory.janitor import list_arenas, remove_tier, sweep
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.process import this_process


def nothing_runs(_tier: str) -> bool:
    return False


def everything_runs(_tier: str) -> bool:
    return True


def test_arenas_are_listed_with_their_owners_and_processes(root: Path) -> None:
    assert list_arenas(root) == []
    owner = open_owner(root)
    owner.attach(plain_layout(), this_process("me"))
    (info,) = list_arenas(root)
    assert (info.tier, info.seat, info.held, info.epoch) == (TIER, SEAT, True, 1)
    assert info.nbytes == owner.capacity_bytes
    assert [session.client for session in info.attached] == ["me"]
    owner.close(unlink=True)
    assert list_arenas(root) == []
    assert not root.exists()


def test_a_held_arena_stays(root: Path) -> None:
    owner = open_owner(root)
    assert sweep(root, is_running=nothing_runs) == []
    assert remove_tier(root, TIER) == []
    owner.close(unlink=True)


def test_an_arena_whose_pool_may_be_restarting_stays(root: Path) -> None:
    open_owner(root).close(unlink=False)
    assert sweep(root, is_running=everything_runs) == []
    open_owner(root).close(unlink=True)


def test_an_arena_that_a_live_process_is_attached_to_stays_until_it_ends(
    root: Path, bystander: Callable[[], Bystander]
) -> None:
    owner = open_owner(root)
    worker = bystander()
    owner.attach(plain_layout(), worker.identity)
    owner.close(unlink=False)
    assert sweep(root, is_running=nothing_runs) == []
    worker.kill()
    assert sweep(root, is_running=nothing_runs) == [root / TIER / f"{SEAT}.arena"]
    assert not root.exists()


def test_removing_a_tier_takes_its_arenas_and_no_others(root: Path) -> None:
    owner = open_owner(root)
    owner.attach(plain_layout(), this_process())
    owner.close(unlink=False)
    assert remove_tier(root, "another") == []
    assert remove_tier(root, TIER) == [root / TIER / f"{SEAT}.arena"]
    assert not root.exists()


def test_a_file_that_no_owner_would_adopt_is_removed_too(root: Path) -> None:
    open_arena(root).close()
    path = root / TIER / f"{SEAT}.arena"
    os.truncate(path, 10)
    assert sweep(root, is_running=nothing_runs) == [path]


def test_looking_never_takes_a_seat_from_a_starting_owner(root: Path) -> None:
    """A probe of the lock is made under the root's lock, as taking a seat is."""
    open_owner(root).close(unlink=False)
    asked: list[str] = []

    def start_meanwhile(tier: str) -> bool:
        asked.append(tier)
        owners.append(open_owner(root))
        return False

    owners: list[ArenaOwner] = []
    assert sweep(root, is_running=start_meanwhile) == []
    assert asked == [TIER]
    for owner in owners:
        owner.close(unlink=True)
