"""The `ray` transport: plain calls of the owning pool's actor, a chunk each.

For places where only Ray's own ports are open. A reply is one chunk, so nothing is left behind
when either side dies, which a streaming generator can't promise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rayhicache.actors.calls import answer
from rayhicache.actors.naming import NAMESPACE, pool_name
from rayhicache.core.keys import PageKey
from rayhicache.errors import RayHiCacheError, TransportError
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
        packed = pack_keys(keys)
        found = self._call(
            seat,
            "lease a prefix",
            lambda pool: pool.peer_lease.options(concurrency_group="peer").remote(
                packed, fingerprint
            ),
            timeout,
        )
        return None if found is None else decode(found, PeerLease)

    def read(self, seat: str, request: ChunkRequest, *, timeout: float) -> bytes:
        """See `Transport.read`."""
        message = encode(request)
        payload: bytes = self._call(
            seat,
            "read a chunk",
            lambda pool: pool.peer_read.options(concurrency_group="peer").remote(message),
            timeout,
        )
        return payload

    def acknowledge(
        self, seat: str, lease: int, suspects: Sequence[PageKey], *, timeout: float
    ) -> None:
        """See `Transport.acknowledge`."""
        packed = pack_keys(suspects)
        self._call(
            seat,
            "end a lease",
            lambda pool: pool.peer_acknowledge.options(concurrency_group="peer").remote(
                lease, packed
            ),
            timeout,
        )

    def _call(
        self, seat: str, what: str, call: Callable[[Any], ray.ObjectRef[Any]], timeout: float
    ) -> Any:
        what = f"{what} at seat {seat!r}"
        try:
            return answer(call(self._pool(seat)), what, timeout)
        except TransportError:
            raise
        except (RayHiCacheError, ValueError) as fault:
            raise TransportError(
                asked=what, found=str(fault), remedy="compute the pages"
            ) from fault

    def _pool(self, seat: str) -> Any:
        with self._lock:
            if seat not in self._handles:
                name = pool_name(self._cluster, seat)
                self._handles[seat] = ray.get_actor(name, namespace=NAMESPACE)
            return self._handles[seat]
