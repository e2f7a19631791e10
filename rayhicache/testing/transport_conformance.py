"""What every `Transport` does, as a suite of tests.

Subclass it in a test module and provide the fixture `peer`: a pool that can be reached, and
`doomed`: one that the test may kill.

    class TestMyTransport(TransportConformance):
        @pytest.fixture
        def peer(self):
            return Peer(transport=..., seat=..., port=..., view=..., layout=..., ...)
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pytest
import torch

from rayhicache.core.keys import PageKey
from rayhicache.core.layout import ComponentSpec, LayerRun, PoolSpec, RecordLayout
from rayhicache.core.slots import Region, SlotRef
from rayhicache.errors import TransportError
from rayhicache.memory.digest import placed, record_digests, run_sums
from rayhicache.memory.port import Port
from rayhicache.memory.view import ArenaView
from rayhicache.transport.protocol import ChunkRequest, PeerLease, Transport

SECONDS = 20.0
SHORT_SECONDS = 0.3
SLACK_SECONDS = 5.0

_numbers = itertools.count(1)


def fresh_pages(count: int) -> list[PageKey]:
    """Keys that nobody has used."""
    names = itertools.islice(_numbers, count)
    return [PageKey(hashlib.blake2b(b"%d" % n, digest_size=16).digest()) for n in names]


def small_layouts() -> dict[str, RecordLayout]:
    """Layouts that differ in pools, layers, widths and layer groups."""

    def pool(name: str, layers: tuple[int, ...], *widths: int) -> PoolSpec:
        components = tuple(
            ComponentSpec(name=f"c{at}", block_bytes=width, dtype="uint8")
            for at, width in enumerate(widths)
        )
        return PoolSpec(name=name, layer_ids=layers, components=components, block_tokens=4)

    return {
        "two-groups": RecordLayout(
            page_tokens=4, pools=(pool("kv", (0, 1), 4096),), num_layer_groups=2
        ),
        "sparse-index": RecordLayout(
            page_tokens=4,
            pools=(pool("kv", (0, 1, 2, 3, 4), 656, 1152), pool("index", (0, 3), 132 * 4)),
            num_layer_groups=3,
        ),
        "one-odd-layer": RecordLayout(page_tokens=4, pools=(pool("kv", (7,), 577),)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another pool as its readers and its own workers see it.

    Attributes:
        transport, seat: the way to it.
        port, view, region: of a worker that is attached to it.
        layout: of its arena.
        muted: while entered, it accepts calls and doesn't answer.
        kill: it dies, and doesn't come back.
    """

    transport: Transport
    seat: str
    port: Port
    view: ArenaView
    region: Region
    layout: RecordLayout
    muted: Callable[[], AbstractContextManager[None]]
    kill: Callable[[], None]

    @property
    def runs(self) -> Sequence[LayerRun]:
        """What is read of each record: one run per layer group."""
        return self.layout.shape(self.region.group).group_runs

    def content(self, key: PageKey) -> bytes:
        """A record's bytes derive from its key."""
        return hashlib.shake_128(key).digest(self.region.record_bytes)

    def record(self, ref: SlotRef) -> memoryview:
        """A slot's bytes in the peer's arena, writable."""
        start = (ref.slot - self.region.first_slot) * self.region.record_bytes
        return self.view.region(self.region.group)[start : start + self.region.record_bytes]

    def store(self, keys: Sequence[PageKey]) -> None:
        """Its worker stores these pages."""
        reserved = self.port.reserve(keys, parent=None)
        assert reserved is not None
        refs = [fill.ref for fill in reserved.fills]
        for fill in reserved.fills:
            self.record(fill.ref)[:] = self.content(fill.key)
        data = torch.frombuffer(self.view.region(self.region.group), dtype=torch.uint8)
        digests = record_digests(self.layout, self.region, data, refs, list(keys))
        assert self.port.commit(refs, digests) == len(keys)

    def lease(self, keys: Sequence[PageKey]) -> PeerLease:
        """A lease on pages that are there."""
        lease = self.ask(keys)
        assert lease is not None
        return lease

    def ask(self, keys: Sequence[PageKey], timeout: float = SECONDS) -> PeerLease | None:
        """Ask for a lease."""
        fingerprint = self.layout.fingerprint()
        return self.transport.lease(self.seat, keys, fingerprint, timeout=timeout)

    def read(self, lease: PeerLease, group: int, timeout: float = SECONDS) -> bytes:
        """One layer group of all leased records."""
        return self.transport.read(self.seat, chunk(lease, group), timeout=timeout)

    def end(self, lease: PeerLease, suspects: Sequence[PageKey] = ()) -> None:
        """Acknowledge."""
        self.transport.acknowledge(self.seat, lease.lease, suspects, timeout=SECONDS)


def chunk(lease: PeerLease, group: int) -> ChunkRequest:
    """A request for one layer group of all leased records."""
    return ChunkRequest(lease=lease.lease, epoch=lease.epoch, refs=lease.refs, layer_group=group)


class TransportConformance:
    """Subclass this; see the module."""

    def test_every_layer_group_arrives_byte_for_byte(self, peer: Peer) -> None:
        """And the groups of a record are all of it that its layers need."""
        keys = fresh_pages(3)
        peer.store(keys)
        lease = peer.lease(keys)
        for group, run in enumerate(peer.runs):
            wanted = b"".join(
                peer.content(key)[run.offset : run.offset + run.nbytes] for key in keys
            )
            assert bytes(peer.read(lease, group)) == wanted
        peer.end(lease)

    def test_some_records_of_a_lease_can_be_read_alone_and_in_any_order(self, peer: Peer) -> None:
        """The answer is in the order of the request."""
        keys = fresh_pages(3)
        peer.store(keys)
        lease = peer.lease(keys)
        request = replace(chunk(lease, 0), refs=(lease.refs[2], lease.refs[0]))
        run = peer.runs[0]
        wanted = [peer.content(key)[run.offset : run.offset + run.nbytes] for key in keys]
        payload = peer.transport.read(peer.seat, request, timeout=SECONDS)
        assert bytes(payload) == wanted[2] + wanted[0]
        peer.end(lease)

    def test_the_digests_are_of_the_leased_bytes_key_and_generation(self, peer: Peer) -> None:
        """So an asker can check what it got, whoever it got it from."""
        keys = fresh_pages(2)
        peer.store(keys)
        lease = peer.lease(keys)
        fingerprint = peer.layout.fingerprint()
        for group, run in enumerate(peer.runs):
            rows = torch.frombuffer(bytearray(peer.read(lease, group)), dtype=torch.uint8)
            rows = rows.view(len(keys), run.nbytes)
            sums = run_sums(peer.layout, peer.region.group, group, rows).tolist()
            for at, key in enumerate(keys):
                mine = placed(sums[at], key, lease.refs[at].generation, (fingerprint, group))
                assert lease.digests[at][group] == mine
        peer.end(lease)

    def test_only_the_longest_prefix_that_is_there_is_leased(self, peer: Peer) -> None:
        """A page after a gap is of no use to anybody."""
        keys = fresh_pages(4)
        peer.store([*keys[:2], keys[3]])
        lease = peer.lease(keys)
        assert len(lease.refs) == len(lease.digests) == 2
        peer.end(lease)

    def test_a_peer_that_has_nothing_of_a_prefix_says_none(self, peer: Peer) -> None:
        """That is no fault."""
        assert peer.ask(fresh_pages(2)) is None

    def test_an_asker_with_another_layout_gets_nothing(self, peer: Peer) -> None:
        """Bytes of one layout mean nothing in another (R27)."""
        keys = fresh_pages(1)
        peer.store(keys)
        assert peer.transport.lease(peer.seat, keys, "0" * 64, timeout=SECONDS) is None

    def test_a_request_of_another_life_is_refused(self, peer: Peer) -> None:
        """Epochs fence the dead."""
        keys = fresh_pages(1)
        peer.store(keys)
        lease = peer.lease(keys)
        old = replace(chunk(lease, 0), epoch=lease.epoch - 1)
        with pytest.raises(TransportError, match="epoch"):
            peer.transport.read(peer.seat, old, timeout=SECONDS)
        peer.end(lease)

    def test_records_that_the_lease_does_not_hold_are_refused(self, peer: Peer) -> None:
        """Neither another slot, nor another life of its slot, nor a group that isn't there."""
        keys = fresh_pages(2)
        peer.store(keys)
        lease = peer.lease(keys[:1])
        other = peer.lease(keys)
        (mine,) = lease.refs
        for refs, group in (
            ((other.refs[1],), 0),
            ((SlotRef(mine.slot, mine.generation + 1),), 0),
            ((mine,), len(peer.runs)),
        ):
            wrong = replace(chunk(lease, group), refs=refs)
            with pytest.raises(TransportError):
                peer.transport.read(peer.seat, wrong, timeout=SECONDS)
        peer.end(lease)
        peer.end(other)

    def test_nothing_can_be_read_after_the_acknowledgement(self, peer: Peer) -> None:
        """The owner may have given the slot to somebody else; acknowledging twice is harmless."""
        keys = fresh_pages(1)
        peer.store(keys)
        lease = peer.lease(keys)
        peer.end(lease)
        with pytest.raises(TransportError, match="lease had ended"):
            peer.read(lease, 0)
        peer.end(lease)

    def test_a_slot_that_is_rewritten_after_a_read_does_not_change_what_was_read(
        self, peer: Peer
    ) -> None:
        """R30: what a read returned are the old bytes, whatever becomes of the slot."""
        keys = fresh_pages(1)
        peer.store(keys)
        lease = peer.lease(keys)
        payload = peer.read(lease, 0)
        peer.end(lease, suspects=keys)
        peer.record(lease.refs[0])[:] = b"\xff" * peer.region.record_bytes
        run = peer.runs[0]
        assert bytes(payload) == peer.content(keys[0])[run.offset : run.offset + run.nbytes]

    def test_a_suspect_is_not_found_again(self, peer: Peer) -> None:
        """No request fails twice on one record."""
        keys = fresh_pages(2)
        peer.store(keys)
        peer.end(peer.lease(keys), suspects=keys[1:])
        lease = peer.lease(keys)
        assert len(lease.refs) == 1
        peer.end(lease)

    def test_every_call_to_a_mute_peer_ends_within_its_limit(self, peer: Peer) -> None:
        """R28: it accepted the call and never answers."""
        keys = fresh_pages(1)
        peer.store(keys)
        lease = peer.lease(keys)
        with peer.muted():
            for call in (
                lambda: peer.ask(keys, SHORT_SECONDS),
                lambda: peer.read(lease, 0, SHORT_SECONDS),
                lambda: peer.transport.acknowledge(
                    peer.seat, lease.lease, (), timeout=SHORT_SECONDS
                ),
            ):
                begun = time.monotonic()
                with pytest.raises(TransportError):
                    call()
                assert time.monotonic() - begun < SHORT_SECONDS + SLACK_SECONDS

    def test_calls_to_a_dead_peer_are_transport_errors(self, doomed: Peer) -> None:
        """Also those under a lease that it had granted."""
        keys = fresh_pages(1)
        doomed.store(keys)
        lease = doomed.lease(keys)
        doomed.kill()
        for call in (
            lambda: doomed.ask(keys, SHORT_SECONDS),
            lambda: doomed.read(lease, 0, SHORT_SECONDS),
            lambda: doomed.transport.acknowledge(
                doomed.seat, lease.lease, (), timeout=SHORT_SECONDS
            ),
        ):
            with pytest.raises(TransportError):
                call()

    def test_a_seat_that_never_was_is_a_transport_error(self, peer: Peer) -> None:
        """A directory may be wrong."""
        with pytest.raises(TransportError):
            peer.transport.lease("no-such-seat", fresh_pages(1), "0" * 64, timeout=SHORT_SECONDS)
