"""Device blocks for requests, and the open stores that still hold blocks of earlier ones."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rayhicache.device.ticket import Ticket
from rayhicache.errors import QueueFull
from rayhicache.pools.base import PoolSet


class Room:
    """The blocks of an engine's pools. One thread.

    Args:
        wait_seconds: how long `take` may wait for one store after the other.
    """

    def __init__(self, pools: PoolSet, *, wait_seconds: float) -> None:
        self._pools = pools
        self._wait_seconds = wait_seconds
        self._stores: list[Ticket] = []

    def add_store(self, ticket: Ticket) -> None:
        """Remember an open store."""
        self._stores = [open_ for open_ in self._stores if open_.result(0) is None]
        self._stores.append(ticket)

    def take_now(self, count: int) -> list[int] | None:
        """Take blocks, or None, and nothing, if there aren't as many. Doesn't wait."""
        return self._pools.allocate(count)

    def take(self, count: int) -> list[int]:
        """Take blocks; where open stores hold them, wait for those, oldest first.

        Raises:
            QueueFull: no store is open that could give any back, or the oldest doesn't end.
        """
        deadline = time.monotonic() + self._wait_seconds
        while (blocks := self._pools.allocate(count)) is None:
            if not self._stores or not self._settle_oldest(deadline):
                allocator = self._pools.allocator
                raise QueueFull(
                    asked=f"take {count} device blocks",
                    found=f"{allocator.num_free()} of {self._pools.num_blocks} are free, "
                    f"copies hold {allocator.num_held()}",
                    remedy="see which copy stream hangs, or raise num_blocks",
                )
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks; those that a ticket holds are taken again only after it has closed."""
        self._pools.free(blocks)

    def settle(self, timeout: float) -> bool:
        """Block until the stores so far have ended, at most `timeout` seconds; False if not."""
        deadline = time.monotonic() + timeout
        self._stores = [
            ticket
            for ticket in self._stores
            if ticket.result(max(deadline - time.monotonic(), 0)) is None
        ]
        return not self._stores

    def _settle_oldest(self, deadline: float) -> bool:
        if self._stores[0].result(max(deadline - time.monotonic(), 0)) is None:
            return False
        del self._stores[0]
        return True
