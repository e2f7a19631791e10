"""The `ray` transport: plain calls of the owning pool's actor, a chunk each.

For places where only Ray's own ports are open. A reply is one chunk, so nothing is left behind
when either side dies, which a streaming generator can't promise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray

from rayhicache.actors.calls import ActorGone, ask
from rayhicache.actors.naming import NAMESPACE, pool_name
from rayhicache.core.keys import PageKey
from rayhicache.errors import MessageError, RayHiCacheError, TransportError
from rayhicache.transport.protocol import ChunkRequest, PeerLease
from rayhicache.wire.codec import decode, encode
from rayhicache.wire.messages import pack_keys


class RayTransport:
    """See `rayhicache.transport.protocol.Transport`."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}

    def lease(
        self, seat: str, keys: Sequence[PageKey], fingerprint: str, *, timeout: float
    ) -> PeerLease | None:
        """See `Transport.lease`."""
        found = self._call(
            seat, "lease a prefix", timeout, "peer_lease", pack_keys(keys), fingerprint
        )
        if found is None:
            return None
        try:
            return decode(found, PeerLease)
        except MessageError as fault:
            raise _unusable(f"lease a prefix at seat {seat!r}", fault) from fault

    def read(self, seat: str, request: ChunkRequest, *, timeout: float) -> bytes:
        """See `Transport.read`."""
        payload: bytes = self._call(seat, "read a chunk", timeout, "peer_read", encode(request))
        return payload

    def acknowledge(
        self, seat: str, lease: int, suspects: Sequence[PageKey], *, timeout: float
    ) -> None:
        """See `Transport.acknowledge`."""
        self._call(seat, "end a lease", timeout, "peer_acknowledge", lease, pack_keys(suspects))

    def _call(self, seat: str, what: str, timeout: float, method: str, *args: object) -> Any:
        what = f"{what} at seat {seat!r}"
        try:
            return ask(self._pool(seat), method, *args, what=what, timeout=timeout, group="peer")
        except TransportError:
            raise
        except (RayHiCacheError, ValueError) as fault:
            if isinstance(fault, ActorGone):
                # A cluster that was launched anew has another actor under that name.
                with self._lock:
                    self._handles.pop(seat, None)
            raise _unusable(what, fault) from fault

    def _pool(self, seat: str) -> Any:
        with self._lock:
            if seat not in self._handles:
                name = pool_name(self._cluster, seat)
                self._handles[seat] = ray.get_actor(name, namespace=NAMESPACE)
            return self._handles[seat]


def _unusable(what: str, fault: Exception) -> TransportError:
    return TransportError(asked=what, found=str(fault), remedy="compute the pages")
