"""Whether an arena fits this host, asked before a byte of it is touched.

An arena that doesn't fit is found out late and badly: tmpfs answers the first touch with SIGBUS,
a cgroup kills, and Ray's memory monitor, which counts the arena, kills the pool.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayhicache.errors import ArenaTooLarge

RAY_MEMORY_USAGE_THRESHOLD = 0.95
RAY_THRESHOLD_VARIABLE = "RAY_memory_usage_threshold"
RESERVE_BYTES = 128 << 20
_NO_LIMIT = 1 << 60
_HUGE_PAGE_BYTES = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What a host has, in bytes.

    Attributes:
        filesystem_free: of the filesystem that holds arenas.
        huge_pages: that filesystem hands out pages set aside at boot (hugetlbfs), which neither
            the cgroup, nor `available`, nor Ray's monitor count.
        total, available: of the host.
        cgroup_limit, cgroup_used: of the tightest memory cgroup around this process; the limit
            is None if there is none.
    """

    filesystem_free: int
    huge_pages: bool
    total: int
    available: int
    cgroup_limit: int | None
    cgroup_used: int


def read_host_memory(
    folder: Path, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """Read what this host has.

    Args:
        folder: an existing folder of the filesystem that holds arenas.
        proc, cgroup: where proc and the cgroup filesystems are mounted.
    """
    filesystem = os.statvfs(folder)
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    meminfo = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    limits = list(_cgroup_limits(proc, cgroup))
    limit, used = min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return HostMemory(
        filesystem_free=filesystem.f_bavail * filesystem.f_frsize,
        huge_pages=filesystem.f_bsize >= _HUGE_PAGE_BYTES,
        total=meminfo["MemTotal"],
        available=meminfo["MemAvailable"],
        cgroup_limit=limit,
        cgroup_used=used,
    )


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each memory cgroup from this process's up to the mount's root."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = cgroup / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the mount's root may be the process's own group, whatever its path.
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(mount):
                break
            limit = _number(folder / names[0])
            if limit is not None and limit < _NO_LIMIT:
                used = (_number(folder / names[1]) or 0) - _inactive(folder, names[2])
                yield limit, max(used, 0)


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" or no file."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return int(text) if text.isdigit() else None


def _inactive(folder: Path, name: str) -> int:
    """Page cache that the kernel takes back before it kills; usage counts it."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def ray_monitor_threshold() -> float:
    """The fraction of memory above which Ray's monitor kills, as this process was told it."""
    told = os.environ.get(RAY_THRESHOLD_VARIABLE, "")
    try:
        return float(told)
    except ValueError:
        return RAY_MEMORY_USAGE_THRESHOLD


def check_room(
    asked_bytes: int,
    memory: HostMemory,
    *,
    promised_bytes: int = 0,
    reserve_bytes: int = RESERVE_BYTES,
    monitor_threshold: float = RAY_MEMORY_USAGE_THRESHOLD,
) -> None:
    """Refuse an arena that this host can't hold.

    Args:
        asked_bytes: of the new arena.
        promised_bytes: that other owners of the host were granted and haven't touched yet; what
            they have touched is in use already, as the kernel counts it.
        reserve_bytes: left to processes.
        monitor_threshold: fraction of the memory in use above which Ray kills.

    Raises:
        ArenaTooLarge: with what each limit leaves.
    """
    total = memory.total
    used = memory.total - memory.available
    left = {"filesystem": memory.filesystem_free - promised_bytes}
    if not memory.huge_pages:
        left["available memory"] = memory.available - promised_bytes - reserve_bytes
        if memory.cgroup_limit is not None:
            room = memory.cgroup_limit - memory.cgroup_used
            left["cgroup"] = room - promised_bytes - reserve_bytes
            if memory.cgroup_limit < total:
                # Ray's monitor measures a container against its own limit.
                total, used = memory.cgroup_limit, memory.cgroup_used
        left["Ray's memory monitor"] = int(total * monitor_threshold) - used - promised_bytes
    tightest = min(left, key=lambda name: left[name])
    if asked_bytes <= left[tightest]:
        return
    numbers = ", ".join(f"{name} leaves {max(room, 0):,} B" for name, room in left.items())
    raise ArenaTooLarge(
        asked=f"make an arena of {asked_bytes:,} B",
        found=f"{numbers} ({promised_bytes:,} B promised to other arenas, "
        f"{reserve_bytes:,} B kept in reserve)",
        remedy=f"ask for at most {max(left[tightest], 0):,} B, or give {tightest} more",
        asked_bytes=asked_bytes,
        left_bytes=max(left[tightest], 0),
        limit=tightest,
    )
