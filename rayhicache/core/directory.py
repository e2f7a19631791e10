"""Which pools might hold which pages: a hint, never the truth.

The owner's lease is the truth. A directory may be wrong or gone; pools announce to it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayhicache.core.keys import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What changed in one pool, in the order in which it happened: removals first.

    Attributes:
        seat: name of the pool.
        epoch: its life; an announcement of an earlier one is passed over.
        whole: `stored` is all that the pool has, so everything else of it is forgotten.
        stored, removed: page keys.
    """

    seat: str
    epoch: int
    whole: bool
    stored: tuple[PageKey, ...]
    removed: tuple[PageKey, ...]


@dataclass(slots=True)
class DirectoryTable:
    """Page keys to the seats that announced them, of one shard."""

    holders: dict[PageKey, set[str]] = field(default_factory=dict)
    keys: dict[str, set[PageKey]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def announce(self, message: Announcement) -> bool:
        """Apply an announcement; False if it must be followed by a whole one.

        A pool that the table doesn't know, or knows in another life, has to tell all it has.
        """
        known = self.epochs.get(message.seat)
        if known is not None and message.epoch < known:
            return True
        if known != message.epoch or message.whole:
            self.forget(message.seat)
            if not message.whole:
                return False
            self.epochs[message.seat] = message.epoch
            self.keys[message.seat] = set()
        mine = self.keys[message.seat]
        for key in message.removed:
            self._remove(key, message.seat)
            mine.discard(key)
        for key in message.stored:
            self.holders.setdefault(key, set()).add(message.seat)
            mine.add(key)
        return True

    def forget(self, seat: str) -> None:
        """Drop everything that a pool announced: it is gone or not to be trusted."""
        for key in self.keys.pop(seat, set()):
            self._remove(key, seat)
        self.epochs.pop(seat, None)

    def counts(self, keys: Sequence[PageKey]) -> dict[str, int]:
        """How many leading pages of a prompt each seat might have; those with none are left out."""
        found: dict[str, int] = {}
        holding: set[str] | None = None
        for at, key in enumerate(keys):
            here = self.holders.get(key, set())
            holding = set(here) if holding is None else holding & here
            if not holding:
                break
            for seat in holding:
                found[seat] = at + 1
        return found

    def check(self) -> None:
        """Assert that both directions of the table agree."""
        assert set(self.keys) == set(self.epochs)
        pairs = {(key, seat) for key, seats in self.holders.items() for seat in seats}
        assert pairs == {(key, seat) for seat, keys in self.keys.items() for key in keys}
        assert all(self.holders.values())

    def _remove(self, key: PageKey, seat: str) -> None:
        seats = self.holders.get(key)
        if seats is not None:
            seats.discard(seat)
            if not seats:
                del self.holders[key]
