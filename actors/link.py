"""The Ray `Port`: a worker's way to the `L2Pool` of its node."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rayhicache.actors.calls import ActorFault, ActorGone, ActorSlow, LateAnswers, answer, start
from rayhicache.actors.naming import NAMESPACE, pool_name
from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.outcomes import Reserved
from rayhicache.core.slots import SlotRef
from rayhicache.errors import (
    NoLocalPool,
    PoolUnreachable,
    RayHiCacheError,
    SessionEnded,
    StaleSlot,
    TierClosed,
)
from rayhicache.logs import name_process
from rayhicache.memory.open_leases import OpenLeases
from rayhicache.memory.port import Attachment, OpenSlots
from rayhicache.memory.process import this_process
from rayhicache.memory.sessions import LIFE_BITS
from rayhicache.memory.view import ArenaView
from rayhicache.wire.codec import decode, encode
from rayhicache.wire.messages import Commit, Refs, pack_keys

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.1
DETACH_SECONDS = 600.0
DETACH_PAUSE_SECONDS = 1.0


class RayPort:
    """See `rayhicache.memory.port.Port`. Every call is one actor call with a limit.

    A thread reads the pool's epoch from the mapped arena; when it has changed the pool was
    restarted, and the port attaches its session again by itself, with what is open.

    Args:
        seat: of this node's pool.
        client: a name for people.
        call_seconds: limit of a call; a lookup that pulls may take `pull_seconds` more.
    """

    def __init__(
        self, cluster: str, seat: str, *, client: str, call_seconds: float, pull_seconds: float
    ) -> None:
        self._cluster = cluster
        self._seat = seat
        self._client = client
        self._call_seconds = call_seconds
        self._pull_seconds = pull_seconds
        self._leases = OpenLeases()
        self._session: int | None = None
        self._epoch = 0
        self._layout: RecordLayout | None = None
        self._open_slots: Callable[[], OpenSlots] | None = None
        self._closed = threading.Event()
        self._view: ArenaView | None = None
        self._claimed: set[SlotRef] = set()
        self._late = LateAnswers()
        self._watcher = threading.Thread(target=self._watch, name="epoch-watcher", daemon=True)
        try:
            self._pool: Any = ray.get_actor(pool_name(cluster, seat), namespace=NAMESPACE)
        except ValueError as fault:
            raise NoLocalPool(
                asked=f"reach the pool of seat {seat!r} in cluster {cluster!r}",
                found="Ray knows no such actor",
                remedy="launch the cluster, or run the worker on a node that has a pool",
            ) from fault

    def attach(self, layout: RecordLayout, open_slots: Callable[[], OpenSlots]) -> Attachment:
        """See `Port.attach`."""
        assert self._session is None, "a port has one session"
        identity = encode(this_process(self._client))
        attachment = self._attach(encode(layout), identity)
        self._layout, self._open_slots = layout, open_slots
        self._view = ArenaView.open(attachment)
        self._session, self._epoch = attachment.session, attachment.epoch
        name_process(tier=self._cluster, node=self._seat, epoch=self._epoch)
        self._watcher.start()
        return attachment

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        """See `Port.lookup`. What the mapped index has already is one short call."""
        assert self._view is not None
        packed = pack_keys(keys)
        if self._view.probe(keys) == len(keys):
            answered = self._ask("lookup", "lookup", self._opened(), packed, undo=self._undo_lookup)
        else:
            answered = self._ask(
                "look up and pull",
                "lookup_or_pull",
                self._opened(),
                packed,
                group="pull",
                timeout=self._call_seconds + self._pull_seconds,
                undo=self._undo_lookup,
            )
        hit = decode(answered, Hit)
        if hit.lease is not None:
            self._leases.granted(hit.lease.id)
        return hit

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        """See `Port.reserve`."""
        session = self._opened()
        answered = self._ask(
            "reserve",
            "reserve",
            session,
            pack_keys(keys),
            bytes(parent or b""),
            group,
            undo=lambda late: self._undo_reserve(session, late),
        )
        return None if answered is None else decode(answered, Reserved)

    def commit(self, refs: Sequence[SlotRef], digests: Sequence[tuple[int, ...]]) -> int:
        """See `Port.commit`."""
        message = encode(Commit(refs=tuple(refs), digests=tuple(digests)))
        return int(self._ask("commit", "commit", self._opened(), message))

    def abort(self, refs: Sequence[SlotRef], *, sealed: bool) -> None:
        """See `Port.abort`."""
        self._ask("abort", "abort", self._opened(), encode(Refs(refs=tuple(refs))), sealed)

    def unseal(self, refs: Sequence[SlotRef]) -> None:
        """See `Port.unseal`."""
        self._ask("unseal", "unseal", self._opened(), encode(Refs(refs=tuple(refs))))

    def release(self, lease: int) -> None:
        """See `Port.release`."""
        at_owner = self._leases.released(lease)
        if at_owner is not None:
            self._ask("release a lease", "release", at_owner)

    def doubt(self, keys: Sequence[PageKey]) -> None:
        """See `Port.doubt`."""
        self._ask("doubt records", "doubt", pack_keys(keys))

    def close(self) -> None:
        """See `Port.close`."""
        self._closed.set()
        session, self._session = self._session, None
        if session is None:
            return
        self._watcher.join(self._call_seconds)
        if self._view is not None:
            self._view.close()
        try:
            self._ask("detach", "detach", session)
        except PoolUnreachable:
            # A restarted pool waits for the session, since it can't know that nothing is open.
            args = (session, time.monotonic() + DETACH_SECONDS)
            threading.Thread(target=self._detach, args=args, name="detach", daemon=True).start()
            raise

    def _detach(self, session: int, deadline: float) -> None:
        pause = threading.Event()
        while ray.is_initialized() and time.monotonic() < deadline:
            try:
                self._ask("detach", "detach", session)
            except PoolUnreachable:
                if not _is_known(self._cluster, self._seat):
                    return
                pause.wait(DETACH_PAUSE_SECONDS)
            else:
                return

    def _watch(self) -> None:
        assert self._view is not None
        while not self._closed.wait(WATCH_SECONDS):
            try:
                if self._view.epoch() != self._epoch:
                    self._reattach()
                self._let_go()
            except RayHiCacheError as fault:
                log.warning("attaching again to seat %s: %s", self._seat, fault)

    def _reattach(self) -> None:
        """Go on with the pool's new life: name what is open, so that nobody else gets it."""
        session = self._session
        assert self._open_slots is not None
        if session is None:
            return
        identity = encode(this_process(self._client))
        named = self._open_slots()
        # Noted first: should the answer be lost, the pool has claimed them all the same.
        self._claimed |= set(named.writing)
        try:
            answered, lease = self._ask(
                "attach again", "reattach", session, identity, encode(named)
            )
        except SessionEnded:
            if named.reading or named.writing:
                # The session's slots may be somebody else's now. What is open ends first.
                raise
            self._claimed.clear()
            again, lease = self._attach_anew(identity), None
        else:
            again = decode(answered, Attachment)
        surplus = self._leases.recovered(lease, first_lease=again.epoch << LIFE_BITS)
        self._epoch = again.epoch
        name_process(tier=self._cluster, node=self._seat, epoch=again.epoch)
        log.info("attached again to seat %s in epoch %d", self._seat, again.epoch)
        if surplus is not None:
            self._ask("release a lease", "release", surplus)

    def _attach_anew(self, identity: bytes) -> Attachment:
        """The successor doesn't know the session: open another one on the same file."""
        assert self._view is not None
        assert self._layout is not None
        again = self._attach(encode(self._layout), identity)
        if again.uuid != self._view.attachment.uuid:
            self._ask("detach", "detach", again.session)
            raise SessionEnded(
                asked=f"attach again to seat {self._seat!r}",
                found="its arena was replaced by another one",
                remedy="restart this worker; until then it computes without the tier",
            )
        self._session = again.session
        return again

    def _let_go(self) -> None:
        """Slots that were named as being written are unsealed once nobody here writes them.

        A ticket that closed while the pool was down, or just then, could not say so itself.
        """
        session = self._session
        if not self._claimed or session is None:
            return
        assert self._open_slots is not None
        for ref in self._claimed - set(self._open_slots().writing):
            with contextlib.suppress(StaleSlot):
                self._ask("unseal", "unseal", session, encode(Refs(refs=(ref,))))
            self._claimed.discard(ref)

    def _attach(self, layout: bytes, identity: bytes) -> Attachment:
        answered = self._ask("attach", "attach", layout, identity, undo=self._undo_attach)
        return decode(answered, Attachment)

    def _undo_attach(self, late: bytes) -> None:
        self._ask("detach", "detach", decode(late, Attachment).session)

    def _undo_lookup(self, late: bytes) -> None:
        hit = decode(late, Hit)
        if hit.lease is not None:
            self._ask("release a lease", "release", hit.lease.id)

    def _undo_reserve(self, session: int, late: bytes | None) -> None:
        if late is not None:
            refs = tuple(fill.ref for fill in decode(late, Reserved).fills)
            self._ask("abort", "abort", session, encode(Refs(refs=refs)), False)

    def _ask(
        self,
        what: str,
        method: str,
        *args: object,
        group: str = "",
        timeout: float | None = None,
        undo: Callable[[Any], None] | None = None,
    ) -> Any:
        """Call the pool.

        Args:
            undo: called with the answer should it come after the limit.
        """
        what = f"{what} at the pool of seat {self._seat!r} (process {os.getpid()})"
        ref: Any = None
        try:
            ref = start(self._pool, method, *args, what=what, group=group)
            return answer(ref, what, timeout or self._call_seconds)
        except (ActorGone, ActorFault, TierClosed) as fault:
            if undo is not None and isinstance(fault, ActorSlow):
                self._late.add(ref, undo)
            raise PoolUnreachable(
                asked=what,
                found=fault.found,
                remedy="go on without the tier; Ray restarts the pool and it keeps its records",
            ) from fault

    def _opened(self) -> int:
        if self._session is None:
            raise SessionEnded(
                asked=f"use the port of {self._client!r}",
                found="it is not attached",
                remedy="attach first, and don't use it after close",
            )
        return self._session


def _is_known(cluster: str, seat: str) -> bool:
    """Whether there is, or will be again, a pool of that seat."""
    try:
        ray.get_actor(pool_name(cluster, seat), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
