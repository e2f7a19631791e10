"""The one mutex of an arena's owner, and the tier that is only ever used under it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rayhicache.core.tier import Tier
from rayhicache.errors import SessionEnded, TierClosed
from rayhicache.memory.outbox import Outbox


class Decider:
    """Lets one thread at a time use the tier, and tells what came of it after.

    Args:
        path: of the arena, for messages.
        clock: seconds, for the deadlines of leases.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.outbox = Outbox()
        self.now = clock
        self._path = path
        self._mutex = threading.Lock()
        self._tier: Tier | None = None
        self._closed = False

    @contextlib.contextmanager
    def deciding(self) -> Iterator[Tier]:
        """The tier, under the mutex: no I/O and no wait in here.

        Raises:
            TierClosed: after `close`.
            SessionEnded: nobody has attached yet, so there is no session either.
        """
        try:
            with self._mutex:
                tier = self._present()
                tier.expire(self.now())
                try:
                    yield tier
                finally:
                    self.outbox.post(tier.drain())
        finally:
            self.outbox.deliver()

    @contextlib.contextmanager
    def looking(self) -> Iterator[Tier | None]:
        """The tier, if there is one, under the mutex, to look at and not to change."""
        with self._mutex:
            yield self._tier

    @contextlib.contextmanager
    def starting(self) -> Iterator[Callable[[Tier], None]]:
        """The mutex while the tier is made; call what it gives with the tier."""
        with self._mutex:
            yield self._start

    def close(self) -> bool:
        """End all waiting and refuse what comes; False if it was closed before."""
        with self._mutex:
            if self._closed:
                return False
            self._closed = True
            self.outbox.end_all()
        self.outbox.deliver()
        return True

    def _start(self, tier: Tier) -> None:
        assert self._tier is None
        self._tier = tier

    def check_open(self) -> None:
        """Raise `TierClosed` after `close`."""
        if self._closed:
            raise TierClosed(
                asked=f"use the arena {self._path}",
                found="its owner is closed",
                remedy="attach to its successor",
            )

    def _present(self) -> Tier:
        self.check_open()
        if self._tier is None:
            raise ended(0, "nobody has attached yet")
        return self._tier


def ended(session: int, found: str) -> SessionEnded:
    """The error for a session that is not, or no longer, open."""
    return SessionEnded(
        asked=f"act for session {session}",
        found=found,
        remedy="attach again; its leases are gone",
    )
