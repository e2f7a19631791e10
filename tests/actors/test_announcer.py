"""What the directory is told: all at first, then changes, and all again after a fault."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rayhicache.actors.announcer import Announcer
from rayhicache.actors.calls import ActorGone
from rayhicache.core.directory import Announcement, DirectoryTable
from rayhicache.core.keys import PageKey
from rayhicache.core.outcomes import Effects

SECONDS = 20.0


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "big"))


class Place:
    """A pool's keys and a directory, that can be replaced, be away, or be slow."""

    def __init__(self) -> None:
        self.have: set[PageKey] = set()
        self.table = DirectoryTable()
        self.away = False
        self.messages: queue.SimpleQueue[Announcement] = queue.SimpleQueue()
        self.before_send: Callable[[], None] = lambda: None

    def send(self, message: Announcement) -> bool:
        self.before_send()
        self.messages.put(message)
        if self.away:
            raise ActorGone(asked="announce", found="it is away", remedy="again")
        known = self.table.announce(message)
        self.table.check()
        return known

    def change(self, announcer: Announcer, *, stored: int = 0, removed: int = 0) -> None:
        gone = tuple(("full", key(number)) for number in (removed,) if number)
        come = tuple(("full", key(number)) for number in (stored,) if number)
        self.have = {*self.have} - {page for _, page in gone} | {page for _, page in come}
        announcer.tell(Effects(stored=come, removed=gone, wakes=()))

    def agrees(self) -> bool:
        """The directory comes to know exactly what the pool has."""
        pause = threading.Event()
        for _ in range(int(SECONDS / 0.01)):
            if self.table.keys.get("a") == self.have:
                return True
            pause.wait(0.01)
        return False


@contextmanager
def announcing(place: Place) -> Iterator[Announcer]:
    announcer = Announcer("a", 1, place.send, lambda: sorted(place.have))
    yield announcer
    announcer.stop()


def test_a_new_pool_tells_everything_it_has() -> None:
    place = Place()
    place.have = {key(1), key(2)}
    with announcing(place):
        assert place.agrees()
        assert place.messages.get(timeout=SECONDS).whole


def test_changes_are_told_as_changes() -> None:
    place = Place()
    with announcing(place) as announcer:
        assert place.agrees()
        place.messages.get(timeout=SECONDS)
        place.change(announcer, stored=1)
        message = place.messages.get(timeout=SECONDS)
        assert (message.whole, message.stored) == (False, (key(1),))
        place.change(announcer, stored=2, removed=1)
        assert place.agrees()


def test_a_directory_that_was_restarted_is_told_everything_again() -> None:
    """Without any change in the pool: a heartbeat finds out."""
    place = Place()
    with announcing(place) as announcer:
        place.change(announcer, stored=1)
        assert place.agrees()
        place.table = DirectoryTable()
        assert place.agrees()


def test_what_happened_while_the_directory_was_away_is_told_after() -> None:
    place = Place()
    with announcing(place) as announcer:
        place.change(announcer, stored=1)
        assert place.agrees()
        place.away = True
        place.change(announcer, stored=2, removed=1)
        place.messages.get(timeout=SECONDS)
        place.away = False
        assert place.agrees()


@pytest.mark.parametrize("restarts", [False, True])
def test_nothing_is_lost_when_keys_come_and_go_quickly(restarts: bool) -> None:
    place = Place()
    with announcing(place) as announcer:
        for number in range(1, 301):
            place.change(announcer, stored=number % 17 + 1, removed=number % 13 + 1)
            if restarts and number % 50 == 0:
                place.table = DirectoryTable()
        assert place.agrees()


def test_a_change_during_an_announcement_is_told_in_the_next_one() -> None:
    place = Place()
    sending, go = threading.Event(), threading.Event()

    def hold() -> None:
        sending.set()
        go.wait(SECONDS)

    place.before_send = hold
    with announcing(place) as announcer:
        assert sending.wait(SECONDS)
        place.change(announcer, stored=1)
        place.change(announcer, removed=1)
        place.change(announcer, stored=2)
        go.set()
        assert place.agrees()


def test_stopping_does_not_wait_for_a_heartbeat() -> None:
    place = Place()
    announcer = Announcer("a", 1, place.send, list)
    assert place.agrees()
    announcer.stop()
    assert not announcer._thread.is_alive()
