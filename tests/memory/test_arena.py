"""The arena's file: made whole, held by one, adopted as it was left."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from arenas import (
    SEAT,
    SMALL,
    TIER,
    OwnerProcess,
    files_under,
    hybrid_layout,
    key,
    open_arena,
    plain_layout,
)
from rayhicache.core.slots import SlotEntry, SlotState
from rayhicache.errors import ArenaError, ArenaTooLarge, InvalidConfig, SeatTaken
from rayhicache.memory import format as fmt
from rayhicache.memory.arena import Arena
from rayhicache.memory.sizes import HostMemory

READY = SlotEntry(SlotState.READY, 4, 0, key(1), key(0), 0, 0, (1, 2))
ROOMY = HostMemory(
    filesystem_free=1 << 40,
    huge_pages=False,
    total=1 << 40,
    available=1 << 40,
    cgroup_limit=None,
    cgroup_used=0,
)


def path_under(root: Path) -> Path:
    return root / TIER / f"{SEAT}.arena"


def test_a_new_arena_is_private_resident_and_has_no_layout(root: Path) -> None:
    told: list[tuple[int, int]] = []
    arena = Arena.create_or_adopt(
        root, TIER, SEAT, SMALL + 5, progress=lambda done, total: told.append((done, total))
    )
    found = path_under(root).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE(path_under(root).parent.stat().st_mode) == 0o700
    assert found.st_size == arena.capacity_bytes == SMALL
    assert found.st_blocks * 512 >= SMALL
    assert told[-1] == (SMALL, SMALL)
    assert (arena.epoch, arena.layout, arena.regions) == (1, None, ())
    arena.unlink()
    assert not root.exists()


def test_an_adopted_arena_keeps_uuid_layout_and_entries_and_counts_its_lives(root: Path) -> None:
    first = open_arena(root)
    first.format(hybrid_layout())
    first.put(2, READY)
    first.close()
    second = open_arena(root)
    assert (second.uuid, second.epoch) == (first.uuid, 2)
    assert (second.layout, second.regions) == (hybrid_layout(), first.regions)
    entries = dict(second.entries())
    assert entries.pop(2) == READY
    assert {entry.state for entry in entries.values()} == {SlotState.FREE}
    second.unlink()


def test_tables_and_records_fit_and_do_not_overlap(root: Path) -> None:
    arena = open_arena(root)
    arena.format(hybrid_layout())
    num_slots = sum(region.num_slots for region in arena.regions)
    end = fmt.data_offset(num_slots)
    for region in arena.regions:
        assert region.offset >= end
        end = region.offset + region.num_slots * region.record_bytes
    assert end <= arena.capacity_bytes
    # One page more of records would not have fitted.
    spare = arena.capacity_bytes - end
    assert spare < 2 * max(region.record_bytes for region in arena.regions) + fmt.PAGE_BYTES
    arena.unlink()


def test_an_arena_too_small_for_one_record_is_refused(root: Path) -> None:
    arena = open_arena(root)
    with pytest.raises(ArenaError, match="no room for one"):
        arena.format(plain_layout(record_bytes=SMALL))
    assert arena.layout is None
    arena.unlink()


def test_a_seat_has_one_owner(root: Path) -> None:
    arena = open_arena(root)
    with pytest.raises(SeatTaken) as refusal:
        open_arena(root)
    assert str(path_under(root)) in refusal.value.asked
    arena.close()
    open_arena(root).unlink()


def test_the_kernel_gives_the_seat_of_a_killed_owner_back(root: Path) -> None:
    owner = OwnerProcess(root, "churn", "0")
    owner.tells()
    with pytest.raises(SeatTaken):
        open_arena(root)
    owner.kill()
    open_arena(root).unlink()


def test_a_cut_off_making_is_made_again(root: Path) -> None:
    arena = open_arena(root)
    arena.close()
    with path_under(root).open("r+b") as file:
        file.write(bytes(len(fmt.MAGIC)))
    again = open_arena(root)
    assert again.epoch == 1
    assert again.uuid != arena.uuid
    again.unlink()


def spoil_magic(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"NOTARENA")


def spoil_uuid(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(30)
        file.write(b"?")


def write_other_version(path: Path) -> None:
    buffer = bytearray(path.read_bytes())
    identity = fmt.read_identity(memoryview(buffer))
    assert identity is not None
    fmt.write_identity(memoryview(buffer), replace(identity, version=fmt.VERSION + 1))
    path.write_bytes(buffer)


def truncate(path: Path) -> None:
    os.truncate(path, SMALL - 4096)


def behead(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_magic, "NOTARENA"),
        (spoil_uuid, "header is damaged"),
        (write_other_version, "format 2"),
        (truncate, "126,976 of 131,072 B"),
        (behead, "less than its header"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused_and_left(
    root: Path, spoil: Callable[[Path], None], told: str
) -> None:
    open_arena(root).close()
    spoil(path_under(root))
    before = files_under(root)
    with pytest.raises(ArenaError, match=told) as refusal:
        open_arena(root)
    assert refusal.value.remedy == "remove it with: rayhicache down tier"
    assert files_under(root) == before


def test_another_size_than_the_arena_has_is_refused(root: Path) -> None:
    open_arena(root).close()
    with pytest.raises(ArenaError, match="were asked for"):
        open_arena(root, 2 * SMALL)


def test_a_damaged_layout_is_as_good_as_none(root: Path) -> None:
    arena = open_arena(root)
    arena.format(plain_layout())
    arena.close()
    with path_under(root).open("r+b") as file:
        file.seek(fmt.LAYOUT_OFFSET)
        file.write(b"\xff")
    again = open_arena(root)
    assert again.layout is None
    again.unlink()


def test_an_arena_that_does_not_fit_leaves_nothing_behind(root: Path) -> None:
    tight = replace(ROOMY, filesystem_free=SMALL - 1)
    with pytest.raises(ArenaTooLarge):
        Arena.create_or_adopt(root, TIER, SEAT, SMALL, memory=tight)
    assert not root.exists()


def test_a_filesystem_that_is_full_after_all_leaves_nothing_behind(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaTooLarge, match="No space left on device"):
        open_arena(root)
    assert not root.exists()


def test_memory_promised_to_an_owner_that_is_still_filling_is_counted(root: Path) -> None:
    """Two owners start at once on a host that can hold one of them."""
    memory = replace(ROOMY, filesystem_free=SMALL + SMALL // 2)

    def start_second(_done: int, _total: int) -> None:
        Arena.create_or_adopt(root, TIER, "seat-1", SMALL, memory=memory).unlink()

    first = Arena.create_or_adopt(root, TIER, SEAT, SMALL, memory=memory)
    # What it was given is no longer free, and no longer promised either.
    start_second(0, 0)
    first.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: None)
        with pytest.raises(ArenaTooLarge, match="131,072 B promised") as refusal:
            Arena.create_or_adopt(root, TIER, SEAT, SMALL, memory=memory, progress=start_second)
    assert refusal.value.details["left_bytes"] == SMALL // 2
    assert not root.exists()


def test_a_folder_that_others_may_enter_is_refused(root: Path) -> None:
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    with pytest.raises(ArenaError, match="755"):
        open_arena(root)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 101])
def test_names_that_are_no_file_names_are_refused(root: Path, name: str) -> None:
    with pytest.raises(InvalidConfig):
        Arena.create_or_adopt(root, name, SEAT, SMALL)
    with pytest.raises(InvalidConfig):
        Arena.create_or_adopt(root, TIER, name, SMALL)
    assert not root.exists()
