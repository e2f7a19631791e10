"""The suite of transports, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from peers import LAYOUT, owner_of, peer_of
from rayhicache.errors import TransportError
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.process import this_process
from rayhicache.testing.transport_conformance import (
    Peer,
    TransportConformance,
    chunk,
    fresh_pages,
    small_layouts,
)
from rayhicache.transport.server import PeerServer


class TestLocalTransport(TransportConformance):
    @pytest.fixture(params=small_layouts())
    def peer(self, request: pytest.FixtureRequest) -> Iterator[Peer]:
        layout = small_layouts()[request.param]
        with owner_of("a", layout) as owner:
            yield peer_of(owner, "a", layout, lease_seconds=60.0)

    @pytest.fixture
    def doomed(self) -> Iterator[Peer]:
        with owner_of("a", LAYOUT) as owner:
            yield peer_of(owner, "a", LAYOUT, lease_seconds=60.0)


class EndingOwner:
    """An owner of whom a lease ends while its record is being read."""

    def __init__(self, inner: ArenaOwner) -> None:
        self.inner = inner
        self.ends: int | None = None

    def __getattr__(self, name: str) -> object:
        if name == "view" and self.ends is not None:
            lease, self.ends = self.ends, None
            view = self.inner.view

            def view_then_end(*args: object) -> memoryview:
                data = view(*args)  # type: ignore[arg-type]  # handed on as they come
                if self.inner.lease(lease) is not None:
                    self.inner.release(lease)
                return data

            return view_then_end
        return getattr(self.inner, name)


def test_a_lease_that_ends_during_a_read_makes_it_an_error() -> None:
    """R30: the bytes may be another record's already, so the lease is checked after the copy."""
    with owner_of("a", LAYOUT) as owner:
        ending = EndingOwner(owner)
        peer = peer_of(ending, "a", LAYOUT, lease_seconds=60.0)  # type: ignore[arg-type]
        keys = fresh_pages(1)
        peer.store(keys)
        lease = peer.lease(keys)
        ending.ends = lease.lease
        with pytest.raises(TransportError, match="had ended after the read"):
            peer.read(lease, 0)


def test_a_lease_ends_at_its_deadline_without_any_other_call() -> None:
    now = [0.0]
    with owner_of("a", LAYOUT) as plain:
        plain._decider.now = lambda: now[0]
        peer = peer_of(plain, "a", LAYOUT, lease_seconds=10.0)
        keys = fresh_pages(1)
        peer.store(keys)
        lease = peer.lease(keys)
        now[0] = 9.9
        peer.read(lease, 0)
        now[0] = 10.0
        with pytest.raises(TransportError, match="had ended before the read"):
            peer.read(lease, 0)
        assert plain.stats().leases == 0


def test_a_pool_that_nobody_has_attached_to_has_nothing_and_refuses_to_read() -> None:
    with owner_of("a", LAYOUT) as owner:
        server = PeerServer(owner, "a", lambda: 0, lease_seconds=1.0)
        assert server.lease(fresh_pages(1), LAYOUT.fingerprint()) is None
        with owner_of("b", LAYOUT) as other:
            peer = peer_of(other, "b", LAYOUT, lease_seconds=60.0)
            keys = fresh_pages(1)
            peer.store(keys)
            request = replace(chunk(peer.lease(keys), 0), epoch=owner.epoch)
        with pytest.raises(TransportError):
            server.read(request)
        owner.attach(LAYOUT, this_process())
