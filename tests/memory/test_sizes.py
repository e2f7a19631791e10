"""Whether an arena fits, on hosts made up for it (R22)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from rayhicache.errors import ArenaTooLarge
from rayhicache.memory.sizes import (
    HostMemory,
    check_room,
    ray_monitor_threshold,
    read_host_memory,
)

GIB = 1 << 30
HOST = HostMemory(
    filesystem_free=50 * GIB,
    huge_pages=False,
    total=100 * GIB,
    available=90 * GIB,
    cgroup_limit=None,
    cgroup_used=0,
)
IN_CGROUP = replace(HOST, cgroup_limit=40 * GIB, cgroup_used=4 * GIB)


@pytest.mark.parametrize(
    ("memory", "limit", "left"),
    [
        (HOST, "filesystem", 50 * GIB),
        (replace(HOST, available=20 * GIB), "Ray's memory monitor", 15 * GIB),
        (replace(HOST, available=8 * GIB, total=8 * GIB), "available memory", 7 * GIB),
        (replace(IN_CGROUP, cgroup_used=6 * GIB), "Ray's memory monitor", 32 * GIB),
        (replace(IN_CGROUP, cgroup_limit=200 * GIB), "filesystem", 50 * GIB),
        (replace(IN_CGROUP, cgroup_limit=8 * GIB), "cgroup", 3 * GIB),
    ],
)
def test_the_tightest_limit_decides_and_is_named(memory: HostMemory, limit: str, left: int) -> None:
    threshold = 1.0 if limit in ("available memory", "cgroup") else 0.95
    check_room(left, memory, reserve_bytes=GIB, monitor_threshold=threshold)
    with pytest.raises(ArenaTooLarge) as refusal:
        check_room(left + 1, memory, reserve_bytes=GIB, monitor_threshold=threshold)
    assert refusal.value.details["limit"] == limit
    assert refusal.value.details["left_bytes"] == left
    assert f"at most {left:,} B" in refusal.value.remedy


@pytest.mark.parametrize(
    ("memory", "limit"),
    [
        (HOST, "filesystem"),
        (replace(HOST, total=200 * GIB, available=20 * GIB), "available memory"),
        (replace(IN_CGROUP, cgroup_limit=8 * GIB), "cgroup"),
        (replace(HOST, available=20 * GIB), "Ray's memory monitor"),
    ],
)
def test_what_was_promised_to_others_is_taken_off_every_limit(
    memory: HostMemory, limit: str
) -> None:
    threshold = 0.95 if "monitor" in limit else 1.0
    left: list[int] = []
    for promised in (0, 2 * GIB):
        with pytest.raises(ArenaTooLarge) as refusal:
            check_room(1 << 50, memory, promised_bytes=promised, monitor_threshold=threshold)
        assert refusal.value.details["limit"] == limit
        room = refusal.value.details["left_bytes"]
        assert isinstance(room, int)
        left.append(room)
    assert left[0] - left[1] == 2 * GIB


@pytest.mark.parametrize("num_owners", [1, 2, 3, 7])
def test_all_owners_of_a_host_together_stay_under_the_limit_minus_the_reserve(
    num_owners: int,
) -> None:
    asked, granted, promised = 9 * GIB, 0, 0
    for number in range(num_owners):
        # Half of the owners before this one have touched their memory, half only got a promise.
        used = IN_CGROUP.cgroup_used + granted - promised
        memory = replace(IN_CGROUP, cgroup_used=used)
        with contextlib.suppress(ArenaTooLarge):
            check_room(asked, memory, promised_bytes=promised, reserve_bytes=GIB)
            granted += asked
            promised += asked * (number % 2)
    assert IN_CGROUP.cgroup_used + granted <= 40 * GIB - GIB
    assert granted == min(num_owners, 3) * asked


def test_pages_set_aside_at_boot_are_limited_by_their_filesystem_alone() -> None:
    memory = replace(IN_CGROUP, huge_pages=True, available=0, cgroup_limit=GIB)
    check_room(50 * GIB, memory)
    with pytest.raises(ArenaTooLarge):
        check_room(50 * GIB + 1, memory)


def host_folders(tmp_path: Path, *, own_group: str) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    (proc / "self" / "cgroup").write_text(own_group)
    return proc, cgroup


def test_the_tightest_of_nested_cgroups_v2_counts_without_reclaimable_cache(
    tmp_path: Path,
) -> None:
    proc, cgroup = host_folders(tmp_path, own_group="0::/pods/mine\n")
    own = cgroup / "pods" / "mine"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    (own / "memory.current").write_text("10\n")
    (own.parent / "memory.max").write_text("800\n")
    (own.parent / "memory.current").write_text("500\n")
    (own.parent / "memory.stat").write_text("anon 1\ninactive_file 200\n")
    memory = read_host_memory(tmp_path, proc=proc, cgroup=cgroup)
    assert (memory.cgroup_limit, memory.cgroup_used) == (800, 300)
    assert (memory.total, memory.available) == (1000 * 1024, 600 * 1024)


def test_a_cgroup_v1_limit_is_read_from_the_mount_when_the_path_is_not_in_it(
    tmp_path: Path,
) -> None:
    own_group = "5:cpu:/\n4:hugetlb,memory:/docker/not-here\n0::/\n"
    proc, cgroup = host_folders(tmp_path, own_group=own_group)
    mount = cgroup / "memory"
    mount.mkdir()
    (mount / "memory.limit_in_bytes").write_text("4096\n")
    (mount / "memory.usage_in_bytes").write_text("1000\n")
    memory = read_host_memory(tmp_path, proc=proc, cgroup=cgroup)
    assert (memory.cgroup_limit, memory.cgroup_used) == (4096, 1000)


def test_no_limit_in_either_version_is_no_limit(tmp_path: Path) -> None:
    proc, cgroup = host_folders(tmp_path, own_group="4:memory:/\n")
    (cgroup / "memory").mkdir()
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_host_memory(tmp_path, proc=proc, cgroup=cgroup).cgroup_limit is None


def test_this_host_can_be_read() -> None:
    memory = read_host_memory(Path("/dev/shm"))
    assert 0 < memory.available <= memory.total
    assert memory.filesystem_free > 0


@pytest.mark.parametrize(("told", "threshold"), [("0.8", 0.8), ("", 0.95), ("much", 0.95)])
def test_rays_threshold_is_the_one_that_this_process_was_told(
    monkeypatch: pytest.MonkeyPatch, told: str, threshold: float
) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", told)
    assert ray_monitor_threshold() == threshold
