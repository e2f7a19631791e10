"""The owner is restarted in the middle of a call: nobody's slots are read or written (R29)."""

from __future__ import annotations

import gc
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.outcomes import Reserved
from rayhicache.memory.arena import Arena
from rayhicache.memory.digest import is_whole
from rayhicache.memory.local import LocalPort
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.port import Port
from workers import PAGE, SECONDS, Worker, prompt

ARENA_BYTES = 352 << 10  # about a dozen records


class Lives:
    """One arena and its owners, one after the other."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.owner = self._next()

    def _next(self) -> ArenaOwner:
        arena = Arena.create_or_adopt(self._root, "tier", "seat-0", ARENA_BYTES)
        return ArenaOwner(arena, verify=is_whole)

    def remove(self) -> None:
        """The arena goes, and the seat gets another one."""
        self.owner.close(unlink=True)
        self.owner = self._next()

    def restart(self) -> ArenaOwner:
        self.owner.close(unlink=False)
        self.owner = self._next()
        return self.owner


class Gap:
    """A port whose caller is overtaken: something happens after the owner's answer."""

    def __init__(self, inner: Port) -> None:
        self._inner = inner
        self.meanwhile: Callable[[], None] = lambda: None

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        hit = self._inner.lookup(keys)
        self._happen()
        return hit

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        reserved = self._inner.reserve(keys, parent=parent, group=group)
        self._happen()
        return reserved

    def _happen(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Scene:
    """A worker, and the gap after its calls in which the owner is restarted."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        self.worker = Worker(lives.owner)
        inner = self.worker.port._inner
        assert isinstance(inner, LocalPort)
        self.port = inner
        self.gap = Gap(inner)
        self.worker.port._inner = cast("Port", self.gap)

    def restart(self) -> None:
        """Another life begins, and asks this process at once what is open."""
        self.port.reconnect(self.lives.restart())

    def fill_arena(self) -> None:
        """Somebody else takes every slot that isn't held."""
        other = Worker(self.lives.owner)
        number = 100
        while self.lives.owner.stats().evicted_pages < 2 * self.lives.owner.stats().slots:
            other.store(prompt(number, 4 * PAGE))
            number += 1
        other.close()


@pytest.fixture
def scene(lives: Lives) -> Iterator[Scene]:
    made = Scene(lives)
    yield made
    made.worker.close()
    made.worker.check()
    gc.collect()


@pytest.fixture
def lives() -> Iterator[Lives]:
    root = Path(f"/dev/shm/rhc-{secrets.token_hex(4)}")
    made = Lives(root)
    yield made
    made.owner.check()
    stats = made.owner.stats()
    assert (stats.leases, stats.filling, stats.sealed, stats.sessions) == (0, 0, 0, 0)
    made.owner.close(unlink=True)
    shutil.rmtree(root, ignore_errors=True)


def test_what_was_leased_before_a_restart_and_noted_after_is_a_miss(scene: Scene) -> None:
    """The new life was told of nothing, so the slots are anybody's."""
    scene.worker.store(prompt(1, 3 * PAGE))

    def overtaken() -> None:
        scene.restart()
        scene.fill_arena()

    scene.gap.meanwhile = overtaken
    found = scene.worker.lookup(prompt(1, 3 * PAGE + 1))
    assert found.tokens == 0
    assert found.hit.lease is None
    assert scene.lives.owner.stats().leases == 0


def test_a_lookup_that_is_overtaken_finds_it_all_the_next_time(scene: Scene) -> None:
    scene.worker.store(prompt(1, 3 * PAGE))
    scene.gap.meanwhile = scene.restart
    assert scene.worker.restore(prompt(1, 3 * PAGE + 1)) == 0
    assert scene.worker.restore(prompt(1, 3 * PAGE + 1)) == 3 * PAGE


def test_what_was_reserved_before_a_restart_and_noted_after_is_not_written(scene: Scene) -> None:
    """Else the copies would land in records that others have stored meanwhile."""
    tokens = prompt(2, 4 * PAGE)
    blocks = scene.worker.take(len(tokens))
    scene.worker.compute(tokens, blocks)
    mine: list[list[int]] = []

    def overtaken() -> None:
        scene.restart()
        other = Worker(scene.lives.owner)
        for number in range(200, 203):
            mine.append(prompt(number, 4 * PAGE))
            other.store(mine[-1])
        other.close()

    scene.gap.meanwhile = overtaken
    ticket = scene.worker.client.store(
        "s", scene.worker.client.prompt(tokens), blocks, stop=len(tokens)
    )
    outcome = ticket.result(SECONDS)
    assert outcome is not None
    assert not outcome.done
    scene.worker.pools.free(blocks)
    for stored in mine:
        assert scene.worker.restore([*stored, 0]) == 4 * PAGE
    assert scene.worker.hits([*tokens, 0]) == 0


def test_a_load_that_a_restart_overtakes_keeps_its_slots_until_it_has_ended(scene: Scene) -> None:
    scene.worker.store(prompt(3, 3 * PAGE))
    found = scene.worker.lookup(prompt(3, 3 * PAGE + 1))
    scene.restart()
    assert scene.lives.owner.stats().leases == 1
    scene.fill_arena()
    blocks = scene.worker.take(found.tokens)
    ticket = scene.worker.load(found, blocks)
    scene.worker.read(blocks)
    scene.worker.expect(prompt(3, 3 * PAGE + 1), blocks)
    assert ticket.result(SECONDS).done
    assert scene.lives.owner.stats().leases == 0
    scene.worker.pools.free(blocks)


def test_a_worker_of_a_removed_arena_gets_nothing_from_its_successor(scene: Scene) -> None:
    """Its mapping is of another file: slots of the new one would be other bytes."""
    scene.worker.store(prompt(4, 2 * PAGE))
    scene.lives.remove()
    other = Worker(scene.lives.owner)
    other.store(prompt(4, 2 * PAGE))
    scene.port._owner = scene.lives.owner  # as an actor of the same name
    assert scene.worker.hits(prompt(4, 2 * PAGE + 1)) == 0
    assert other.hits(prompt(4, 2 * PAGE + 1)) == 2 * PAGE
    other.close()
