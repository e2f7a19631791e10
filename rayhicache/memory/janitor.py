"""Which arenas a host has, and removing those of tiers that are gone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rayhicache.core.slots import Session
from rayhicache.memory import folder as folders
from rayhicache.memory import format as fmt
from rayhicache.memory.process import ProcessIdentity, is_alive, own_pid_namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaInfo:
    """One arena of this host.

    Attributes:
        path, tier, seat: where it lies.
        nbytes: of the file.
        held: an owner holds its lock.
        epoch: lives of its owner so far.
        attached: sessions whose processes live.
    """

    path: Path
    tier: str
    seat: str
    nbytes: int
    held: bool
    epoch: int
    attached: tuple[Session, ...]


def list_arenas(root: Path) -> list[ArenaInfo]:
    """The arenas under a root, by name."""
    if not root.is_dir():
        return []
    with folders.locked_root(root):
        return [info for info in map(_look, folders.arena_files(root)) if info is not None]


def sweep(root: Path, *, is_running: Callable[[str], bool]) -> list[Path]:
    """Remove the arenas of tiers that are gone, and folders that are empty then.

    Kept are arenas that an owner holds, that a live process is attached to, or whose tier runs:
    its pool may just be restarting.

    Args:
        is_running: whether a tier of that name runs; asked once per tier, without any lock held.

    Returns:
        What was removed.
    """
    gone = {info.tier for info in list_arenas(root)}
    gone = {tier for tier in gone if not is_running(tier)}
    return _remove(root, lambda info: info.tier in gone and not info.attached)


def remove_tier(root: Path, tier: str) -> list[Path]:
    """Remove a tier's arenas that no owner holds, attached or not.

    A process that has mapped one keeps its mapping: it reads and writes on, for nobody.

    Returns:
        What was removed.
    """
    return _remove(root, lambda info: info.tier == tier)


def _remove(root: Path, goes: Callable[[ArenaInfo], bool]) -> list[Path]:
    if not root.is_dir():
        return []
    removed = []
    with folders.locked_root(root):
        for path in folders.arena_files(root):
            info = _look(path)
            # Nobody can take the seat meanwhile: taking one needs the root's lock.
            if info is not None and not info.held and goes(info):
                path.unlink()
                removed.append(path)
        for folder in (*(path.parent for path in removed), root):
            folders.remove_if_empty(folder)
    return removed


def _look(path: Path) -> ArenaInfo | None:
    """What is known of an arena without being its owner; None if it has just gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        nbytes = os.fstat(fd).st_size
        epoch, sessions = _read_head(fd) if nbytes >= fmt.TABLE_OFFSET else (0, [])
        return ArenaInfo(
            path=path,
            tier=path.parent.name,
            seat=path.name.removesuffix(folders.SUFFIX),
            nbytes=nbytes,
            held=not folders.try_lock(fd),
            epoch=epoch,
            attached=tuple(session for session in sessions if _lives(session)),
        )
    finally:
        os.close(fd)


def _read_head(fd: int) -> tuple[int, list[Session]]:
    with mmap.mmap(fd, fmt.TABLE_OFFSET, prot=mmap.PROT_READ) as head, memoryview(head) as view:
        if fmt.read_identity(view) is None:
            return 0, []
        return fmt.read_epoch(view), fmt.read_sessions(view)


def _lives(session: Session) -> bool:
    # One of another namespace can't be judged. Removing the file harms no mapping of it.
    return session.pid_namespace == own_pid_namespace() and is_alive(
        ProcessIdentity(
            pid=session.pid,
            start_time=session.start_time,
            pid_namespace=session.pid_namespace,
            client=session.client,
        )
    )
