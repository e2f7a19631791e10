"""Workers of a test share one owner, and must have given back everything at the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from owners import local_owner
from rayhicache.memory.owner import ArenaOwner
from workers import MakeWorker, Worker


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    with local_owner(4 << 20) as owner:
        yield owner


@pytest.fixture
def worker(owner: ArenaOwner) -> Iterator[MakeWorker]:
    """Make workers, which must have given back everything at the end."""
    made: list[Worker] = []

    def make(**options: Any) -> Worker:
        made.append(Worker(options.pop("owner", owner), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.check()
    gc.collect()  # mapped arenas go with the last tensor over them
