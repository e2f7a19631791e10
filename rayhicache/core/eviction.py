"""Which records go first.

A policy only knows records that are READY; the tier tells it of each that comes, is used or
goes, and asks for victims when it needs room.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rayhicache.core.keys import PageKey


class EvictionPolicy(Protocol):
    """The order in which unheld records of one region are evicted.

    The caller guarantees that a key is added once until it is removed, and that calls come one
    at a time. No call blocks.
    """

    def add(self, key: PageKey, parent: PageKey | None) -> None:
        """A record turned READY. `parent` is the key of the page before it."""

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Records were used together; in prefix order. Unknown keys are passed over."""

    def remove(self, key: PageKey) -> None:
        """A record is gone."""

    def victims(self, count: int, held: Callable[[PageKey], bool]) -> list[PageKey]:
        """The `count` records to evict next, in order, fewer if there are no more unheld ones.

        Changes no order: the caller may evict all of them or none.
        """


@dataclass(slots=True)
class _Entry:
    parent: PageKey | None
    stamp: int


@dataclass(slots=True)
class PrefixLru:
    """Least recently used first, but a page never before the pages that follow it.

    Only leaves of the prefix tree are candidates, in a heap by last use whose outdated items are
    dropped when met. A page that is there without its parent is a tree of its own; children are
    counted by key, so a parent that comes later finds them.
    """

    entries: dict[PageKey, _Entry] = field(default_factory=dict)
    children: dict[PageKey, int] = field(default_factory=dict)
    heap: list[tuple[int, PageKey]] = field(default_factory=list)
    clock: int = 0

    def add(self, key: PageKey, parent: PageKey | None) -> None:
        """See `EvictionPolicy.add`."""
        assert key not in self.entries
        self.entries[key] = _Entry(parent, 0)
        if parent is not None:
            self.children[parent] = self.children.get(parent, 0) + 1
        self._stamp(key)

    def touch(self, keys: Sequence[PageKey]) -> None:
        """See `EvictionPolicy.touch`."""
        entries, children, clock = self.entries, self.children, self.clock
        for key in reversed(keys):
            entry = entries.get(key)
            if entry is not None:
                clock += 1
                entry.stamp = clock
                if not children.get(key):
                    heapq.heappush(self.heap, (clock, key))
        self.clock = clock
        if len(self.heap) > 4 * len(self.entries) + 64:
            self.heap = [(entry.stamp, key) for key, entry in self.entries.items()]
            heapq.heapify(self.heap)

    def remove(self, key: PageKey) -> None:
        """See `EvictionPolicy.remove`."""
        parent = self.entries.pop(key).parent
        if parent is None:
            return
        self.children[parent] -= 1
        if not self.children[parent]:
            del self.children[parent]
            if parent in self.entries:
                heapq.heappush(self.heap, (self.entries[parent].stamp, parent))

    def victims(self, count: int, held: Callable[[PageKey], bool]) -> list[PageKey]:
        """See `EvictionPolicy.victims`. O((count + held leaves) log n)."""
        chosen: list[PageKey] = []
        put_back: list[tuple[int, PageKey]] = []
        gone: dict[PageKey, int] = {}
        seen: set[PageKey] = set()
        while self.heap and len(chosen) < count:
            stamp, key = heapq.heappop(self.heap)
            entry = self.entries.get(key)
            alive = entry is not None and entry.stamp == stamp and key not in seen
            if not alive or self.children.get(key, 0) > gone.get(key, 0):
                continue
            assert entry is not None
            seen.add(key)
            put_back.append((stamp, key))
            if held(key):
                continue
            chosen.append(key)
            parent = entry.parent
            if parent is None:
                continue
            gone[parent] = gone.get(parent, 0) + 1
            above = self.entries.get(parent)
            if above is not None and gone[parent] == self.children[parent]:
                heapq.heappush(self.heap, (above.stamp, parent))
        for item in put_back:
            heapq.heappush(self.heap, item)
        return chosen

    def _stamp(self, key: PageKey) -> None:
        self.clock += 1
        self.entries[key].stamp = self.clock
        if not self.children.get(key):
            heapq.heappush(self.heap, (self.clock, key))
