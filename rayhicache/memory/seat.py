"""Taking a seat: its lock, and a file whose memory is all there before anybody maps it."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from rayhicache.errors import ArenaError, ArenaTooLarge, SeatTaken
from rayhicache.memory import folder as folders
from rayhicache.memory import format as fmt
from rayhicache.memory.sizes import HostMemory, check_room, ray_monitor_threshold, read_host_memory

_FILL_CHUNK_BYTES = 256 << 20


def take_seat(
    path: Path,
    capacity_bytes: int,
    progress: Callable[[int, int], None],
    memory: HostMemory | None,
) -> tuple[int, fmt.Identity]:
    """Lock a seat's file and see that it is an arena; see `Arena.create_or_adopt`.

    Returns:
        The file, which holds the lock until it is closed, and what it is. When it was made anew
        and the host can't hold it, nothing is left behind.
    """
    root = path.parent.parent
    fd = -1
    try:
        with folders.locked_root(root):
            folders.make_private(path.parent)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not folders.try_lock(fd):
                raise SeatTaken(
                    asked=f"take the seat {path}",
                    found="another process holds its lock",
                    remedy="stop that pool, or launch this one under another seat",
                )
            page_bytes = os.fstatvfs(fd).f_bsize
            capacity_bytes = capacity_bytes // page_bytes * page_bytes
            identity = _stored_identity(fd, path, capacity_bytes)
            if identity is None:
                _grant(fd, path, capacity_bytes, memory)
        # Filling takes long, so it is done under the seat's lock alone.
        return fd, identity or _fill(fd, path, capacity_bytes, progress)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        with folders.locked_root(root):
            folders.remove_if_empty(path.parent)
            folders.remove_if_empty(root)
        raise


def _stored_identity(fd: int, path: Path, capacity_bytes: int) -> fmt.Identity | None:
    """The identity of the arena that is there, None if there is none or its making was cut off."""
    size = os.fstat(fd).st_size
    if size < fmt.TABLE_OFFSET:
        if size:
            raise untrusted(path, f"it has {size:,} B, less than its header")
        return None
    with mmap.mmap(fd, fmt.TABLE_OFFSET, prot=mmap.PROT_READ) as head, memoryview(head) as view:
        magic = fmt.read_magic(view)
        if magic == bytes(len(fmt.MAGIC)):
            return None
        identity = fmt.read_identity(view)
    if identity is None:
        raise untrusted(path, f"it begins with {magic!r} or its header is damaged")
    if identity.version != fmt.VERSION:
        raise untrusted(path, f"it is of format {identity.version}, this is {fmt.VERSION}")
    if size != identity.capacity_bytes:
        raise untrusted(path, f"it has {size:,} of {identity.capacity_bytes:,} B")
    if identity.capacity_bytes != capacity_bytes:
        raise untrusted(
            path, f"it has {identity.capacity_bytes:,} B and {capacity_bytes:,} B were asked for"
        )
    return identity


def _grant(fd: int, path: Path, capacity_bytes: int, memory: HostMemory | None) -> None:
    """Check the size and give the file its length, which tells other owners of the grant."""
    root = path.parent.parent
    try:
        if capacity_bytes < fmt.TABLE_OFFSET + fmt.PAGE_BYTES:
            raise ArenaError(
                asked=f"make an arena of {capacity_bytes:,} B",
                found=f"its tables alone take {fmt.TABLE_OFFSET:,} B",
                remedy="ask for more",
            )
        # What an earlier, cut-off making left is given back before the room is measured.
        os.ftruncate(fd, 0)
        check_room(
            capacity_bytes,
            memory or read_host_memory(root),
            promised_bytes=folders.promised_bytes(root, besides=path),
            monitor_threshold=ray_monitor_threshold(),
        )
        os.ftruncate(fd, capacity_bytes)
    except BaseException:
        path.unlink()
        raise


def _fill(
    fd: int, path: Path, capacity_bytes: int, progress: Callable[[int, int], None]
) -> fmt.Identity:
    """Have the kernel provide every page, then write the header: only whole arenas have one."""
    done = 0
    try:
        while done < capacity_bytes:
            chunk = min(_FILL_CHUNK_BYTES, capacity_bytes - done)
            os.posix_fallocate(fd, done, chunk)
            done += chunk
            progress(done, capacity_bytes)
    except BaseException as fault:
        path.unlink()
        if not isinstance(fault, OSError):
            raise
        raise ArenaTooLarge(
            asked=f"make an arena of {capacity_bytes:,} B",
            found=f"the filesystem gave {done:,} B: {fault.strerror}",
            remedy="ask for less, or give the filesystem more",
            asked_bytes=capacity_bytes,
        ) from fault
    identity = fmt.Identity(
        version=fmt.VERSION, capacity_bytes=capacity_bytes, uuid=secrets.token_bytes(16)
    )
    with mmap.mmap(fd, fmt.PAGE_BYTES) as head, memoryview(head) as view:
        fmt.write_identity(view, identity)
    return identity


def untrusted(path: Path, found: str) -> ArenaError:
    """An arena's file that can't be adopted, and the command that removes it."""
    tier = path.parent.name
    return ArenaError(
        asked=f"adopt the arena {path}",
        found=found,
        remedy=f"remove it with: rayhicache down {tier}",
    )
