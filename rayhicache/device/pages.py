"""Device blocks of a pool: who has them, and what must have run before a load overwrites them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rayhicache.device.protocols import Device, Event
from rayhicache.errors import DoubleFree


class PageAllocator:
    """Blocks of the pools that share one block table. Any thread may call.

    A block that is freed remembers the compute stream's event, which a load into it waits for;
    a block that an open ticket holds is reusable only when the ticket has closed.
    """

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._device = device
        self._lock = threading.Lock()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()
        self._holds: list[frozenset[int]] = []
        self._freed_while_held: set[int] = set()
        self._fences: dict[int, Event] = {}

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or None, and nothing, if there aren't as many."""
        with self._lock:
            if count > len(self._free):
                return None
            blocks = [self._free.pop() for _ in range(count)]
            self._used.update(blocks)
            return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Records the caller's current stream: its work may still use them.

        Raises:
            DoubleFree: a block is free already, or named twice; nothing was freed.
        """
        event = self._device.new_event()
        self._device.current_stream().record(event)
        with self._lock:
            wrong = [b for b in blocks if b not in self._used or b in self._freed_while_held]
            if wrong or len(set(blocks)) != len(blocks):
                raise DoubleFree(
                    asked=f"free blocks {list(blocks)[:8]}",
                    found=f"not in use: {wrong[:8]}" if wrong else "a block is named twice",
                    remedy="free each block once, by its owner",
                    blocks=tuple(wrong),
                )
            for block in blocks:
                self._fences[block] = event
                if any(block in hold for hold in self._holds):
                    self._freed_while_held.add(block)
                else:
                    self._used.remove(block)
                    self._free.append(block)

    def hold(self, blocks: frozenset[int]) -> None:
        """A ticket owns these blocks until `unhold`."""
        with self._lock:
            self._holds.append(blocks)

    def unhold(self, blocks: frozenset[int]) -> None:
        """The ticket has closed; blocks that were freed meanwhile become reusable."""
        with self._lock:
            self._holds.remove(blocks)
            if self._freed_while_held:
                done = (self._freed_while_held & blocks).difference(*self._holds)
                self._freed_while_held -= done
                self._used -= done
                self._free.extend(sorted(done))

    def fences(self, blocks: frozenset[int]) -> list[Event]:
        """The distinct events that a load into these blocks must wait for.

        Not the whole running forward: only the work that may still use these very blocks.
        """
        with self._lock:
            found: dict[int, Event] = {}
            for block in self._fences.keys() & blocks:
                event = self._fences[block]
                if event.query():
                    del self._fences[block]
                else:
                    found[id(event)] = event
            return list(found.values())

    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        with self._lock:
            return len(self._free)

    def num_held(self) -> int:
        """Blocks that open tickets own."""
        with self._lock:
            return len(frozenset[int]().union(*self._holds))

    def check(self) -> None:
        """Assert conservation: each block is free or used, once."""
        with self._lock:
            assert len(self._free) == len(set(self._free))
            assert set(self._free).isdisjoint(self._used)
            assert len(self._free) + len(self._used) == self.num_blocks
            assert self._freed_while_held <= self._used
            assert self._freed_while_held <= frozenset[int]().union(*self._holds)
