"""The folders that arenas lie in, their locks, and which arenas are there.

    /dev/shm/rayhicache-<uid>/<tier>/<seat>.arena      folders 0700, files 0600

A seat is held by `flock` on its file. Whoever takes, probes or unlinks a seat does so under a
short lock on the root folder, so a probe never makes a starting owner believe its seat taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rayhicache.errors import ArenaError, InvalidConfig

SUFFIX = ".arena"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_BLOCK_BYTES = 512


def default_root() -> Path:
    """Where this user's arenas lie by default."""
    return Path(f"/dev/shm/rayhicache-{os.getuid()}")


def arena_path(root: Path, tier: str, seat: str) -> Path:
    """The file of a seat.

    Raises:
        InvalidConfig: a name that isn't a plain file name.
    """
    for what, name in (("tier", tier), ("seat", seat)):
        if not _NAME.fullmatch(name):
            raise InvalidConfig(
                asked=f"name a {what} {name!r}",
                found="it becomes a file name",
                remedy="use 1 to 100 letters, digits, dots, dashes and underscores",
            )
    return root / tier / f"{seat}{SUFFIX}"


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter.

    Raises:
        ArenaError: it is there and somebody else may enter it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise ArenaError(
            asked=f"keep arenas in {folder}",
            found=f"it is of user {found.st_uid} with mode {found.st_mode & 0o7777:o}",
            remedy=f"remove it, or make it yours: chmod 700 {folder}",
        )


@contextlib.contextmanager
def locked_root(root: Path) -> Iterator[None]:
    """Hold the root folder's lock, making the folder if it isn't there. Held briefly by all."""
    while True:
        make_private(root)
        try:
            folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            # Somebody may have removed the folder before the lock was ours.
            if not is_at(folder, root):
                continue
            yield
            return
        finally:
            os.close(folder)


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one at that path."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def try_lock(fd: int) -> bool:
    """Take a seat's lock if nobody holds it. The caller holds the root's lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def arena_files(root: Path) -> list[Path]:
    """All arenas of a root, by name."""
    return sorted(root.glob(f"*/*{SUFFIX}"))


def promised_bytes(root: Path, *, besides: Path) -> int:
    """Bytes that held arenas were granted and that their owners haven't touched yet.

    The caller holds the root's lock. An arena has its full length before it is filled, so two
    owners that start at once see each other.
    """
    total = 0
    for path in arena_files(root):
        if path == besides:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if not try_lock(fd):
                found = os.fstat(fd)
                total += max(found.st_size - found.st_blocks * _BLOCK_BYTES, 0)
        finally:
            os.close(fd)
    return total


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it; the caller holds the root's lock."""
    with contextlib.suppress(OSError):
        folder.rmdir()
