"""Owners of arenas for tests, on tmpfs, gone afterwards."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rayhicache.memory.arena import Arena
from rayhicache.memory.owner import ArenaOwner


@contextlib.contextmanager
def mortal_owner(capacity_bytes: int = 32 << 20) -> Iterator[ArenaOwner]:
    """A tier's owner in this process, which the test may close."""
    root = Path(f"/dev/shm/rhc-{secrets.token_hex(4)}")
    owner = ArenaOwner(Arena.create_or_adopt(root, "tier", "seat-0", capacity_bytes))
    try:
        yield owner
    finally:
        owner.close(unlink=True)
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def local_owner(capacity_bytes: int = 32 << 20) -> Iterator[ArenaOwner]:
    """As `mortal_owner`, and it must end with nothing held."""
    with mortal_owner(capacity_bytes) as owner:
        yield owner
        if owner.layout is not None:
            owner.check()
        stats = owner.stats()
        assert (stats.leases, stats.filling, stats.sealed, stats.sessions) == (0, 0, 0, 0)
