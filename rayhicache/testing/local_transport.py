"""Transports without a network: straight to the peers' servers, and one with faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rayhicache.core.keys import PageKey
from rayhicache.errors import RayHiCacheError, TransportError
from rayhicache.transport.protocol import ChunkRequest, PeerLease, Transport
from rayhicache.transport.server import PeerServer

Answer = TypeVar("Answer")


class LocalTransport:
    """A `Transport` to servers of this process. A seat that is not connected is dead."""

    def __init__(self) -> None:
        self._servers: dict[str, PeerServer] = {}

    def connect(self, seat: str, server: PeerServer) -> None:
        """A pool is up, or up again."""
        self._servers[seat] = server

    def disconnect(self, seat: str) -> None:
        """A pool has died."""
        del self._servers[seat]

    def lease(
        self, seat: str, keys: Sequence[PageKey], fingerprint: str, *, timeout: float
    ) -> PeerLease | None:
        """See `Transport.lease`."""
        return _reach(seat, lambda: self._servers[seat].lease(keys, fingerprint))

    def read(self, seat: str, request: ChunkRequest, *, timeout: float) -> bytes:
        """See `Transport.read`."""
        return _reach(seat, lambda: self._servers[seat].read(request))

    def acknowledge(
        self, seat: str, lease: int, suspects: Sequence[PageKey], *, timeout: float
    ) -> None:
        """See `Transport.acknowledge`."""
        _reach(seat, lambda: self._servers[seat].acknowledge(lease, suspects))


class FaultyTransport:
    """A `Transport` whose answers a test changes, watches or holds back.

    Attributes:
        change: what becomes of a chunk's bytes on their way.
        before_read: called before each read is sent, on the thread that sends it.
        mute: seats that accept a call and never answer it.
        read_order: the layer groups that were asked for, in order.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._never = threading.Event()
        self.change: Callable[[ChunkRequest, bytes], bytes] = lambda _request, payload: payload
        self.before_read: Callable[[ChunkRequest], None] = lambda _request: None
        self.mute: set[str] = set()
        self.read_order: list[int] = []

    def lease(
        self, seat: str, keys: Sequence[PageKey], fingerprint: str, *, timeout: float
    ) -> PeerLease | None:
        """See `Transport.lease`."""
        self._wait_for(seat, timeout)
        return self._inner.lease(seat, keys, fingerprint, timeout=timeout)

    def read(self, seat: str, request: ChunkRequest, *, timeout: float) -> bytes:
        """See `Transport.read`."""
        self.read_order.append(request.layer_group)
        self.before_read(request)
        self._wait_for(seat, timeout)
        return self.change(request, self._inner.read(seat, request, timeout=timeout))

    def acknowledge(
        self, seat: str, lease: int, suspects: Sequence[PageKey], *, timeout: float
    ) -> None:
        """See `Transport.acknowledge`."""
        self._wait_for(seat, timeout)
        self._inner.acknowledge(seat, lease, suspects, timeout=timeout)

    def _wait_for(self, seat: str, timeout: float) -> None:
        if seat in self.mute:
            self._never.wait(timeout)
            raise _fault(seat, f"no answer within {timeout} s")


def _reach(seat: str, call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except TransportError:
        raise
    except KeyError as fault:
        raise _fault(seat, "it is dead") from fault
    except RayHiCacheError as fault:
        raise _fault(seat, str(fault)) from fault


def _fault(seat: str, found: str) -> TransportError:
    return TransportError(asked=f"call seat {seat!r}", found=found, remedy="compute the pages")
