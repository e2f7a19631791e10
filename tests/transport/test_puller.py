"""Pulling: verified layer group by layer group, all or nothing, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from peers import LAYOUT, LIMITS, Pair, two_nodes
from rayhicache.core.keys import PageKey
from rayhicache.core.outcomes import TierStats
from rayhicache.errors import DigestMismatch, TransportError
from rayhicache.memory.process import this_process
from rayhicache.testing.local_transport import LocalTransport
from rayhicache.testing.transport_conformance import fresh_pages
from rayhicache.transport.protocol import ChunkRequest, PeerLease
from rayhicache.transport.puller import Puller
from rayhicache.transport.server import PeerServer

SECONDS = 20.0
GROUPS = len(LAYOUT.shape().group_runs)


def occupied(stats: TierStats) -> tuple[int, int, int, int]:
    return stats.ready, stats.filling, stats.sealed, stats.leases


def until(go: threading.Event) -> Callable[[ChunkRequest], None]:
    """Before a read: wait."""

    def wait(_request: ChunkRequest) -> None:
        go.wait(SECONDS)

    return wait


def ended(pair: Pair) -> bool:
    """The puller's last acknowledgement has come: it is sent without waiting for it."""
    pair.puller._calls.submit(lambda: None).result(SECONDS)
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.005)):
        if pair.a_owner.stats().leases == 0:
            return True
        pause.wait(0.005)
    return False


def test_a_pulled_prefix_is_found_byte_for_byte() -> None:
    with two_nodes() as pair:
        keys = fresh_pages(5)
        pair.a.store(keys)
        assert pair.pull(keys) == 5
        found = pair.found(keys)
        assert [
            record[: len(right)] for record, right in zip(found, pair.right(keys), strict=True)
        ] == (pair.right(keys))
        assert ended(pair)


def test_a_pulled_record_can_be_pulled_on_by_a_third_node() -> None:
    """Its digests are of its place in this arena, so they are right for the next reader too."""
    with two_nodes() as pair, two_nodes() as next_pair:
        keys = fresh_pages(2)
        pair.a.store(keys)
        pair.pull(keys)
        session = pair.b_owner.attach(LAYOUT, this_process("pool")).session
        local = LocalTransport()
        local.connect("b", PeerServer(pair.b_owner, "b", lambda: session, lease_seconds=60.0))
        mine = next_pair.b_owner.attach(LAYOUT, this_process("pool")).session
        puller = Puller(next_pair.b_owner, local, lambda: mine)
        assert puller.pull("b", keys, 0) == 2
        assert next_pair.found(keys) == pair.found(keys)
        puller.close()


def test_groups_are_asked_for_and_told_in_the_order_of_the_forward() -> None:
    with two_nodes() as pair:
        keys = fresh_pages(3)
        pair.a.store(keys)
        pair.pull(keys)
        assert pair.transport.read_order == sorted(pair.transport.read_order)
        assert pair.told.groups == [(group, tuple(keys)) for group in range(GROUPS)]


def test_a_group_is_told_before_the_next_ones_have_arrived() -> None:
    """A reader can start on layer 0 while the last layers are on their way."""
    with two_nodes() as pair:
        keys = fresh_pages(3)
        pair.a.store(keys)
        go = threading.Event()

        def hold_the_last_group(request: ChunkRequest) -> None:
            if request.layer_group == GROUPS - 1:
                assert go.wait(SECONDS)

        pair.transport.before_read = hold_the_last_group
        with ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(pair.pull, keys)
            assert pair.told.changed.wait(SECONDS)
            assert pair.told.groups[0] == (0, tuple(keys))
            assert pair.found(keys) == [], "nothing is found before the commit"
            go.set()
            assert pulled.result(SECONDS) == 3
        assert len(pair.found(keys)) == 3


def test_only_the_pages_that_are_missing_are_copied() -> None:
    with two_nodes() as pair:
        keys = fresh_pages(4)
        pair.a.store(keys[:2])
        assert pair.pull(keys) == 2
        pair.a.store(keys[2:])
        pair.transport.read_order.clear()
        assert pair.pull(keys, have=2) == 2
        assert len(pair.transport.read_order) == 2 * GROUPS
        assert len(pair.found(keys)) == 4


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_flipped_bit_is_never_seen_and_the_owner_forgets_the_record(group: int) -> None:
    """R31: whichever group it is in, no reader sees it, and nothing stays reserved."""
    with two_nodes() as pair:
        keys = fresh_pages(3)
        pair.a.store(keys)
        chunks_of_group: list[int] = []

        def flip(request: ChunkRequest, payload: bytes) -> bytes:
            if request.layer_group != group:
                return payload
            chunks_of_group.append(len(chunks_of_group))
            if len(chunks_of_group) != 2:  # the second page's chunk
                return payload
            return bytes([payload[0] ^ 1]) + payload[1:]

        pair.transport.change = flip
        before = occupied(pair.b_owner.stats())
        with pytest.raises(DigestMismatch, match=f"layer group {group}"):
            pair.pull(keys)
        told = [number for number, _ in pair.told.groups]
        assert told == list(range(group)), "the bad group was not told"
        assert pair.found(keys) == []
        assert occupied(pair.b_owner.stats()) == before
        pair.b_owner.check()
        assert ended(pair)
        assert pair.a_owner.count_present(keys) < 2, "the owner forgot the suspect"


def test_right_bytes_of_another_page_are_refused() -> None:
    """A digest is of the key too, so records can't trade places on the way."""
    with two_nodes(replace(LIMITS, chunk_bytes=1 << 20)) as pair:
        keys = fresh_pages(2)
        pair.a.store(keys)

        def swap(request: ChunkRequest, payload: bytes) -> bytes:
            half = len(payload) // 2
            return payload[half:] + payload[:half]

        pair.transport.change = swap
        with pytest.raises(DigestMismatch):
            pair.pull(keys)
        assert pair.found(keys) == []


@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"?", lambda p: b""])
def test_a_chunk_of_another_length_is_refused(change: Callable[[bytes], bytes]) -> None:
    with two_nodes() as pair:
        keys = fresh_pages(2)
        pair.a.store(keys)
        pair.transport.change = lambda _request, payload: change(payload)
        with pytest.raises(TransportError, match="instead of"):
            pair.pull(keys)
        assert occupied(pair.b_owner.stats()) == (0, 0, 0, 0)
        assert ended(pair)
        assert pair.a_owner.count_present(keys) == 2, "a fault of the way is not the record's"


@pytest.mark.parametrize("reads", range(0, 2 * GROUPS + 1, 2))
def test_a_peer_that_dies_during_a_pull_leaves_everything_as_it_was(reads: int) -> None:
    """R16: after so many chunks; the slots are free again, and another peer can be asked."""
    with two_nodes() as pair:
        keys = fresh_pages(2)
        pair.a.store(keys)
        count = [0]

        def die(request: ChunkRequest) -> None:
            count[0] += 1
            if count[0] == reads + 1:
                pair.a.kill()

        pair.transport.before_read = die
        if reads < 2 * GROUPS:
            with pytest.raises(TransportError):
                pair.pull(keys)
            assert occupied(pair.b_owner.stats()) == (0, 0, 0, 0)
            assert pair.found(keys) == []
        else:
            assert pair.pull(keys) == 2
        pair.b_owner.check()


def test_a_mute_peer_costs_one_calls_limit() -> None:
    """R28."""
    with two_nodes() as pair:
        keys = fresh_pages(2)
        pair.a.store(keys)
        pair.transport.before_read = lambda _request: pair.transport.mute.add("a")
        with pytest.raises(TransportError, match="no answer within"):
            pair.pull(keys)
        assert occupied(pair.b_owner.stats()) == (0, 0, 0, 0)


def test_a_pull_has_a_limit_as_a_whole() -> None:
    """R28: also when each call by itself is quick enough."""
    with two_nodes(replace(LIMITS, pull_seconds=0.2)) as pair:
        keys = fresh_pages(2)
        pair.a.store(keys)
        go = threading.Event()
        pair.transport.before_read = until(go)
        with pytest.raises(TransportError, match="the whole pull took more"):
            pair.pull(keys)
        assert occupied(pair.b_owner.stats()) == (0, 0, 0, 0)
        go.set()


def test_pulls_of_one_prefix_at_once_copy_it_once() -> None:
    with two_nodes() as pair:
        keys = fresh_pages(3)
        pair.a.store(keys)
        go = threading.Event()
        pair.transport.before_read = until(go)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(pair.pull, keys) for _ in range(2)]
            pause = threading.Event()
            while pair.b_owner.num_waiting() == 0:
                pause.wait(0.005)
            go.set()
            assert sorted(pull.result(SECONDS) for pull in both) == [0, 3]
        assert len(pair.transport.read_order) == 3 * GROUPS
        assert len(pair.found(keys)) == 3


def test_a_pull_that_waits_for_another_one_ends_when_that_fails() -> None:
    with two_nodes() as pair:
        keys = fresh_pages(2)
        pair.a.store(keys)
        go = threading.Event()
        pair.transport.before_read = until(go)
        pair.transport.change = lambda _request, payload: payload[:-1]
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(pair.pull, keys) for _ in range(2)]
            pause = threading.Event()
            while pair.b_owner.num_waiting() == 0:
                pause.wait(0.005)
            go.set()
            faults = [pull.exception(SECONDS) for pull in both]
        assert sorted(isinstance(fault, TransportError) for fault in faults) == [False, True]
        assert occupied(pair.b_owner.stats()) == (0, 0, 0, 0)


def test_an_arena_without_room_pulls_nothing() -> None:
    with two_nodes(room=1) as pair:
        room = pair.b_owner.stats().slots
        keys = fresh_pages(room + 1)
        pair.a.store(keys)
        assert pair.pull(keys) == 0
        assert pair.transport.read_order == []
        assert ended(pair)
        pair.b_owner.check()


def test_a_peer_that_has_nothing_more_pulls_nothing() -> None:
    with two_nodes() as pair:
        keys = fresh_pages(3)
        pair.a.store(keys[:2])
        assert pair.pull(keys) == 2
        assert pair.pull(keys, have=2) == 0
        assert pair.pull(fresh_pages(1)) == 0


class Liar:
    """A peer that leases other records than it was asked for."""

    def __init__(self, pair: Pair, change: Callable[[PeerLease], PeerLease]) -> None:
        self._inner = pair.transport
        self._change = change

    def lease(
        self, seat: str, keys: Sequence[PageKey], fingerprint: str, *, timeout: float
    ) -> PeerLease | None:
        lease = self._inner.lease(seat, keys, fingerprint, timeout=timeout)
        assert lease is not None
        return self._change(lease)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    "change",
    [
        lambda lease: replace(lease, digests=lease.digests[:-1]),
        lambda lease: replace(lease, refs=lease.refs * 2, digests=lease.digests * 2),
        lambda lease: replace(lease, digests=tuple(d[:1] for d in lease.digests)),
    ],
    ids=["fewer digests than records", "more records than asked", "groups without a digest"],
)
def test_a_lease_that_can_not_be_an_answer_is_refused(
    change: Callable[[PeerLease], PeerLease],
) -> None:
    with two_nodes() as pair:
        keys = fresh_pages(2)
        pair.a.store(keys)
        pair.puller._transport = Liar(pair, change)  # type: ignore[assignment]
        with pytest.raises((TransportError, DigestMismatch)):
            pair.pull(keys)
        assert occupied(pair.b_owner.stats()) == (0, 0, 0, 0)
        assert ended(pair)


def test_a_closed_puller_takes_no_more() -> None:
    with two_nodes() as pair:
        keys = fresh_pages(1)
        pair.a.store(keys)
        pair.puller.close()
        with pytest.raises(TransportError, match="this pool is closed"):
            pair.pull(keys)
        assert occupied(pair.b_owner.stats()) == (0, 0, 0, 0)
