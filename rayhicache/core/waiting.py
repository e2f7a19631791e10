"""Who waits for pages that others are filling: parked, so the decider never blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rayhicache.core.keys import PageKey
from rayhicache.core.outcomes import Wake


@dataclass(slots=True)
class _Parked:
    session: int
    keys: set[tuple[int, PageKey]]


@dataclass(slots=True)
class WaitingRoom:
    """Parked waiters of one tier and the wakes that nobody has taken yet."""

    parked: dict[int, _Parked] = field(default_factory=dict)
    wakes: list[Wake] = field(default_factory=list)
    next_waiter: int = 1

    def park(self, keys: Iterable[tuple[int, PageKey]], session: int) -> int:
        """Wait for these (group number, key) pairs, at least one; the waiter's id."""
        waiter = self.next_waiter
        self.next_waiter += 1
        self.parked[waiter] = _Parked(session, set(keys))
        assert self.parked[waiter].keys
        return waiter

    def unpark(self, waiter: int) -> None:
        """Forget a waiter; no wake follows."""
        self.parked.pop(waiter, None)

    def unpark_session(self, session: int) -> None:
        """Forget the waiters of a session that has ended."""
        for waiter in [w for w, parked in self.parked.items() if parked.session == session]:
            del self.parked[waiter]

    def settle(self, group: int, key: PageKey, ready: bool) -> None:
        """A filling has ended: wake who waited for nothing else, or for something now lost."""
        for waiter, parked in list(self.parked.items()):
            if (group, key) not in parked.keys:
                continue
            parked.keys.discard((group, key))
            if not ready or not parked.keys:
                del self.parked[waiter]
                self.wakes.append(Wake(waiter=waiter, ready=ready))

    def check(self, is_filling: Callable[[int, PageKey], bool]) -> None:
        """Assert that everybody waits for something that is still being filled."""
        for parked in self.parked.values():
            assert parked.keys
            assert all(is_filling(group, key) for group, key in parked.keys)
