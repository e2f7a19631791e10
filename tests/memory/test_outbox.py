"""Effects are told in order and none is left lying, whoever happens to deliver."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from arenas import key
from rayhicache.core.outcomes import Effects
from rayhicache.memory.outbox import Outbox

if TYPE_CHECKING:
    import pytest


def stored(number: int) -> Effects:
    return Effects(stored=(("full", key(number)),), removed=(), wakes=())


class LateGuest:
    """A lock in whose last moment somebody posts, and finds it still taken."""

    def __init__(self, outbox: Outbox, effects: Effects) -> None:
        self._lock = threading.Lock()
        self._outbox = outbox
        self._late: list[Effects] = [effects]

    def acquire(self, *, blocking: bool) -> bool:
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        if self._late:
            self._outbox.post(self._late.pop())
            self._outbox.deliver()
        self._lock.release()


def test_effects_posted_while_the_deliverer_leaves_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox = Outbox()
    told: list[Effects] = []
    outbox.subscribe(told.append)
    monkeypatch.setattr(outbox, "_delivering", LateGuest(outbox, stored(2)))
    outbox.post(stored(1))
    outbox.deliver()
    assert told == [stored(1), stored(2)]


def test_a_subscriber_that_brings_more_about_sees_it_after_the_others_were_told() -> None:
    outbox = Outbox()
    told: list[tuple[str, Effects]] = []

    def first(effects: Effects) -> None:
        told.append(("first", effects))
        if effects == stored(1):
            outbox.post(stored(2))
            outbox.deliver()

    outbox.subscribe(first)
    outbox.subscribe(lambda effects: told.append(("second", effects)))
    outbox.post(stored(1))
    outbox.deliver()
    assert told == [(who, stored(n)) for n in (1, 2) for who in ("first", "second")]
