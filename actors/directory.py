"""`Directory`: the actor that knows which pools might have which pages, and the way to it.

Soft state: it may be wrong, slow or gone, and then a lookup finds less.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import ray

from rayhicache.actors.calls import ActorGone, ask
from rayhicache.actors.naming import NAMESPACE, directory_name
from rayhicache.core.directory import Announcement, DirectoryTable
from rayhicache.core.keys import PageKey
from rayhicache.errors import RayHiCacheError
from rayhicache.transport.breaker import Breaker
from rayhicache.wire.codec import decode, encode
from rayhicache.wire.messages import pack_keys, unpack_keys

log = logging.getLogger(__name__)

LONGEST_SECONDS = 2.0


class Directory:
    """One shard. Calls come from any thread of the actor."""

    def __init__(self) -> None:
        self._table = DirectoryTable()
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """True, once it is up."""
        return True

    def announce(self, message: bytes) -> bool:
        """A pool's news; False asks for all that it has."""
        announcement = decode(message, Announcement)
        with self._lock:
            return self._table.announce(announcement)

    def counts(self, keys: bytes) -> dict[str, int]:
        """Per seat, how many leading pages it might have."""
        with self._lock:
            return self._table.counts(unpack_keys(keys))

    def forget(self, seat: str) -> None:
        """A pool is gone."""
        with self._lock:
            self._table.forget(seat)


class DirectoryClient:
    """The way to a cluster's directory. Any thread may call; each call has a limit."""

    def __init__(self, cluster: str, call_seconds: float) -> None:
        self._name = directory_name(cluster)
        self._call_seconds = call_seconds
        self._lock = threading.Lock()
        self._handle: Any = None
        # A directory that hangs shall not cost every prompt of a job its limit.
        self._breaker = Breaker(longest_seconds=LONGEST_SECONDS)

    def announce(self, message: Announcement) -> bool:
        """Tell the directory; False asks for a whole announcement.

        Raises:
            ActorGone: it can't be reached.
        """
        known = bool(self._ask("announce", encode(message)))
        self._breaker.worked(self._name)
        return known

    def counts(self, keys: Sequence[PageKey]) -> dict[str, int]:
        """Per seat, how many leading pages it might have; nothing if it can't be asked."""
        if not self._breaker.allows(self._name):
            return {}
        try:
            found: dict[str, int] = self._ask("counts", pack_keys(keys))
        except RayHiCacheError as fault:
            self._breaker.failed(self._name)
            log.warning("without the directory nothing is pulled: %s", fault)
            return {}
        self._breaker.worked(self._name)
        return found

    def _ask(self, method: str, message: bytes) -> Any:
        actor = self._actor()
        what = f"ask the directory for {method!r}"
        try:
            return ask(actor, method, message, what=what, timeout=self._call_seconds)
        except ActorGone:
            # A cluster that was launched anew has another actor under that name.
            with self._lock:
                self._handle = None
            raise

    def _actor(self) -> Any:
        with self._lock:
            if self._handle is None:
                try:
                    self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
                except ValueError as fault:
                    raise ActorGone(
                        asked=f"find actor {self._name!r}",
                        found=str(fault),
                        remedy="launch the cluster anew if it doesn't come back",
                    ) from fault
            return self._handle
