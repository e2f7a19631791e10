"""`L2Pool`: the actor that owns a node's arena and alone decides about its slots.

Arguments and answers are messages of `rayhicache.wire`, or plain bytes and numbers. The class is
plain; `rayhicache.actors.remote` makes the actor of it, with one group of threads for short
calls and others for those that may take long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayhicache.actors.announcer import Announcer
from rayhicache.actors.directory import DirectoryClient
from rayhicache.actors.ray_transport import RayTransport
from rayhicache.actors.settings import PoolSettings
from rayhicache.actors.status import PoolStatus, SessionStatus
from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.slots import SlotRef
from rayhicache.errors import RayHiCacheError, TierClosed
from rayhicache.logs import name_process
from rayhicache.memory.arena import Arena
from rayhicache.memory.digest import is_whole
from rayhicache.memory.folder import default_root
from rayhicache.memory.owner import ArenaOwner, Reattached
from rayhicache.memory.port import Attachment, OpenSlots
from rayhicache.memory.process import ProcessIdentity, is_stopped, this_process
from rayhicache.transport.breaker import Breaker
from rayhicache.transport.protocol import ChunkRequest, PeerLease
from rayhicache.transport.puller import Puller, PullLimits
from rayhicache.transport.server import PeerServer
from rayhicache.wire.codec import decode, encode
from rayhicache.wire.messages import Commit, Refs, unpack_keys

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rooms:
    """What a pool is made of once it is up."""

    owner: ArenaOwner
    server: PeerServer
    puller: Puller
    announcer: Announcer


class L2Pool:
    """One seat's pool. Ray restarts it, and each life adopts what the last one left.

    The constructor never fails, so that Ray doesn't restart a pool that can't come up: `ready`
    raises what went wrong, and every call tries again.
    """

    def __init__(self, settings: bytes) -> None:
        self._settings = decode(settings, PoolSettings)
        self._directory = DirectoryClient(self._settings.cluster, self._settings.call_seconds)
        self._breaker = Breaker()
        self._own_session: int | None = None
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._rooms: _Rooms | None = None
        self._closed = False
        try:
            self._up()
        except RayHiCacheError as fault:
            log.error("pool %s can't start: %s", self._settings.seat, fault)

    def ready(self) -> int:
        """The pool's epoch, once it is up.

        Raises:
            ArenaTooLarge, SeatTaken, ArenaError: why it isn't.
        """
        return self._up().owner.epoch

    # ── sessions of this node's workers ─────────────────────────────────────────────────────

    def attach(self, layout: bytes, identity: bytes) -> bytes:
        """`Port.attach` for a process of this node."""
        attachment = self._owner.attach(decode(layout, RecordLayout), _identity(identity))
        return encode(attachment)

    def reattach(self, session: int, identity: bytes, slots: bytes) -> tuple[bytes, int | None]:
        """A session of an earlier life names its open slots; attachment and covering lease."""
        named = decode(slots, OpenSlots)
        again: Reattached = self._owner.reattach(
            session, _identity(identity), reading=named.reading, writing=named.writing
        )
        return encode(again.attachment), again.lease

    def detach(self, session: int) -> None:
        """End a session."""
        self._owner.detach(session)

    # ── their calls ─────────────────────────────────────────────────────────────────────────

    def lookup(self, session: int, keys: bytes) -> bytes:
        """`Port.lookup` in this arena only."""
        return encode(self._owner.lookup(unpack_keys(keys), session))

    def lookup_or_pull(self, session: int, packed: bytes) -> bytes:
        """`Port.lookup`, after pulling what another node has more of. May take `pull_seconds`."""
        keys = unpack_keys(packed)
        have = self._owner.count_present(keys)
        if have < len(keys):
            self._pull(keys, have)
        hit = self._owner.lookup(keys, session)
        pulled = max(hit.best - have, 0)
        return encode(Hit(lengths=hit.lengths, lease=hit.lease, pulled=pulled))

    def reserve(self, session: int, keys: bytes, parent: bytes, group: str) -> bytes | None:
        """`Port.reserve`; `parent` is empty for a first page."""
        reserved = self._owner.reserve(
            unpack_keys(keys), session, parent=PageKey(parent) if parent else None, group=group
        )
        return None if reserved is None else encode(reserved)

    def commit(self, session: int, message: bytes) -> int:
        """`Port.commit`."""
        commit = decode(message, Commit)
        return self._owner.commit(commit.refs, session, digests=commit.digests)

    def abort(self, session: int, refs: bytes, sealed: bool) -> None:
        """`Port.abort`."""
        self._owner.abort(_refs(refs), session, sealed=sealed)

    def unseal(self, session: int, refs: bytes) -> None:
        """`Port.unseal`."""
        self._owner.unseal(_refs(refs), session)

    def release(self, lease: int) -> None:
        """`Port.release`."""
        self._owner.release(lease)

    def doubt(self, keys: bytes) -> None:
        """`Port.doubt`."""
        self._owner.doubt(unpack_keys(keys))

    # ── other nodes' pools ──────────────────────────────────────────────────────────────────

    def peer_lease(self, keys: bytes, fingerprint: str) -> bytes | None:
        """`Transport.lease`."""
        lease: PeerLease | None = self._up().server.lease(unpack_keys(keys), fingerprint)
        return None if lease is None else encode(lease)

    def peer_read(self, request: bytes) -> bytes:
        """`Transport.read`; the bare bytes."""
        return self._up().server.read(decode(request, ChunkRequest))

    def peer_acknowledge(self, lease: int, suspects: bytes) -> None:
        """`Transport.acknowledge`."""
        self._up().server.acknowledge(lease, unpack_keys(suspects))

    # ── the cluster ─────────────────────────────────────────────────────────────────────────

    def status(self) -> bytes:
        """What `Cluster.status` tells of this pool, as a `PoolStatus`."""
        stats, layout = self._owner.stats(), self._owner.layout
        own = self._own_session
        token_bytes = layout.token_bytes() if layout is not None else 0.0
        status = PoolStatus(
            seat=self._settings.seat,
            node=self._settings.node,
            epoch=self._owner.epoch,
            capacity_bytes=self._owner.capacity_bytes,
            slots=stats.slots,
            used=stats.ready,
            filling=stats.filling,
            leased=stats.leased,
            sealed=stats.sealed,
            hits=stats.hit_pages,
            misses=stats.miss_pages,
            evictions=stats.evicted_pages,
            stored=stats.stored_pages,
            page_tokens=layout.page_tokens if layout is not None else 0,
            token_bytes=token_bytes,
            tokens_fit=stats.slots * layout.page_tokens if layout is not None else 0,
            sessions=tuple(
                SessionStatus(client=s.client, pid=s.pid, stopped=is_stopped(s.pid))
                for s in self._owner.sessions()
                if s.id != own
            ),
        )
        return encode(status)

    def close(self) -> None:
        """Remove the arena: the cluster is shut down. Idempotent."""
        with self._starting:
            self._closed = True
        if self._rooms is not None:
            self._rooms.announcer.stop()
            self._rooms.puller.close()
            self._rooms.owner.close(unlink=True)

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    @property
    def _owner(self) -> ArenaOwner:
        """The owner, for calls that can't do without.

        Raises:
            TierClosed: the pool is closed, or can't come up.
        """
        try:
            return self._up().owner
        except TierClosed:
            raise
        except RayHiCacheError as fault:
            raise self._refusal(f"it can't come up: {fault}") from fault

    def _up(self) -> _Rooms:
        """The rooms; made now, on the caller's thread, if that has failed so far."""
        if self._rooms is not None:
            return self._rooms
        with self._starting:
            if self._closed:
                raise self._refusal("it is closed")
            if self._rooms is None:
                self._rooms = self._made()
            return self._rooms

    def _made(self) -> _Rooms:
        settings = self._settings
        arena = Arena.create_or_adopt(
            Path(settings.arena_root) if settings.arena_root else default_root(),
            settings.cluster,
            settings.seat,
            settings.arena_bytes,
        )
        try:
            owner = ArenaOwner(arena, verify=is_whole)
        except RayHiCacheError:
            arena.close()
            raise
        name_process(tier=settings.cluster, node=settings.seat, epoch=owner.epoch)
        log.info("pool is up with %d B", owner.capacity_bytes)
        announcer = Announcer(
            settings.seat,
            owner.epoch,
            self._directory.announce,
            lambda: [key for _, key in owner.ready_keys()],
        )
        owner.subscribe(announcer.tell)
        return _Rooms(
            owner=owner,
            server=PeerServer(
                owner, settings.seat, self._session, lease_seconds=settings.lease_seconds
            ),
            puller=Puller(
                owner,
                RayTransport(settings.cluster),
                self._session,
                limits=PullLimits(
                    chunk_bytes=settings.chunk_bytes,
                    chunks_in_flight=settings.chunks_in_flight,
                    call_seconds=settings.call_seconds,
                    pull_seconds=settings.pull_seconds,
                ),
            ),
            announcer=announcer,
        )

    def _refusal(self, found: str) -> TierClosed:
        return TierClosed(
            asked=f"use the pool of seat {self._settings.seat!r}",
            found=found,
            remedy="go on without the tier, and see the pool's log",
        )

    def _session(self) -> int:
        """The pool's own session, for what it fills itself and for readers of other nodes."""
        with self._lock:
            if self._own_session is None:
                layout = self._owner.layout
                assert layout is not None, "leases and pulls come after the first attach"
                attachment: Attachment = self._owner.attach(layout, this_process("pool"))
                self._own_session = attachment.session
            return self._own_session

    def _pull(self, keys: Sequence[PageKey], have: int) -> None:
        """Pull from whoever might have the longest prefix. A fault is a miss."""
        counts = self._directory.counts(keys)
        seats = [
            seat
            for seat, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            if count > have and seat != self._settings.seat and self._breaker.allows(seat)
        ]
        deadline = time.monotonic() + self._settings.pull_seconds
        for seat in seats:
            if time.monotonic() >= deadline:
                return
            try:
                pulled = self._up().puller.pull(seat, keys, have)
            except RayHiCacheError as fault:
                log.warning("pull from %s failed: %s", seat, fault)
                self._breaker.failed(seat)
                continue
            self._breaker.worked(seat)
            if pulled:
                return


def _identity(message: bytes) -> ProcessIdentity:
    return decode(message, ProcessIdentity)


def _refs(message: bytes) -> tuple[SlotRef, ...]:
    return decode(message, Refs).refs
