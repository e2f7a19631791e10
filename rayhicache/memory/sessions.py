"""Sessions of an arena: processes attach, go on after a restart of the owner, and end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from rayhicache.core.eviction import EvictionPolicy
from rayhicache.core.layout import RecordLayout
from rayhicache.core.slots import Session, SlotRef
from rayhicache.core.tier import Tier
from rayhicache.errors import (
    ArenaError,
    InvalidRequest,
    LayoutMismatch,
    SessionEnded,
    StaleSlot,
    TierClosed,
)
from rayhicache.memory.arena import Arena
from rayhicache.memory.decider import Decider, ended
from rayhicache.memory.layout_codec import first_difference
from rayhicache.memory.process import ProcessIdentity, ProcessWatcher, own_pid_namespace

LIFE_BITS = 32
"""An id's bits above these are the owner's epoch."""

SALT_SHIFT = 16


class SessionDesk:
    """Opens and ends sessions: in the tier, in the arena's table, and at the process watcher.

    Any thread may call. Making one adopts what is in the arena.

    Args:
        policy: of eviction, for the tier that is made here.

    Raises:
        ArenaError: processes of another pid namespace are attached to the adopted arena.
    """

    def __init__(
        self, arena: Arena, decider: Decider, policy: Callable[[], EvictionPolicy]
    ) -> None:
        self._arena = arena
        self._decider = decider
        self._policy = policy
        self._attaching = threading.Lock()
        # Ids of two lives differ, and those of two arenas of one seat: a worker that still maps
        # the file of a removed one is refused, and never given slots of another file.
        salt = int.from_bytes(arena.uuid[:2], "little")
        self._next_session = arena.epoch << LIFE_BITS | salt << SALT_SHIFT | 1
        self._earlier = {session.id: session for session in arena.sessions()}
        self._refuse_foreign_sessions()
        self._watcher = ProcessWatcher(self.end, tick=self._tick)
        if arena.layout is not None:
            self._adopt(arena.layout)

    def attach(self, layout: RecordLayout, identity: ProcessIdentity) -> int:
        """See `ArenaOwner.attach`; the session's id."""
        _check_namespace(identity)
        with self._attaching:
            self._fix_layout(layout)
            with self._decider.deciding() as tier:
                session = Session(
                    id=self._next_session,
                    pid=identity.pid,
                    start_time=identity.start_time,
                    pid_namespace=identity.pid_namespace,
                    client=identity.client,
                )
                # Written down first: a session that may hold something is always in the table.
                self._arena.add_session(session)
                self._next_session += 1
                tier.open_session(session)
        if not self._watcher.watch(session.id, identity):
            self.end(session.id)
            raise ended(session.id, f"pid {identity.pid} is gone")
        return session.id

    def reattach(
        self,
        session: int,
        identity: ProcessIdentity,
        *,
        reading: Sequence[SlotRef],
        writing: Sequence[SlotRef],
        part: int,
    ) -> int | None:
        """See `ArenaOwner.reattach`; the lease."""
        with self._decider.deciding() as tier:
            known = self._earlier.get(session)
            is_open = session in {other.id for other in tier.sessions()}
            if known is None or not (is_open or session in tier.recovering()):
                raise ended(session, "it isn't in the arena's table")
            if (known.pid, known.start_time) != (identity.pid, identity.start_time):
                raise ended(session, f"it was opened by pid {known.pid}")
            for ref in (*reading, *writing):
                check_slot(self._arena, ref)
            return tier.reattach(known, reading=reading, writing=writing, part=part)

    def end(self, session: int) -> None:
        """No copy of the session can land any more: free all that it held. Idempotent.

        The watcher's callback, when the process has ended.
        """
        self._watcher.unwatch(session)
        with contextlib.suppress(TierClosed, SessionEnded), self._decider.deciding() as tier:
            # Erased first: should the owner die here, nobody waits for the session to return.
            self._arena.remove_session(session)
            tier.end_session(session)
            self._decider.outbox.end_session(session)

    def close(self) -> bool:
        """Admit nobody and watch nobody any more; False if it was closed before.

        Waits for an attach under way and for the watcher's thread.
        """
        with self._attaching:
            first = self._decider.close()
        self._watcher.close()
        return first

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _fix_layout(self, layout: RecordLayout) -> None:
        """Format the arena for the first layout; refuse another one. Not under the mutex."""
        self._decider.check_open()
        if self._arena.layout is None:
            self._arena.format(layout)
            with self._decider.starting() as start:
                start(self._new_tier(layout))
            return
        difference = first_difference(self._arena.layout, layout)
        if difference is not None:
            raise LayoutMismatch(
                asked=f"attach to the arena {self._arena.path}",
                found=difference,
                remedy="attach with the arena's layout, or remove the arena with: "
                f"rayhicache down {self._arena.path.parent.name}",
            )

    def _adopt(self, layout: RecordLayout) -> None:
        # Under the mutex, so that a process that ends meanwhile is told after the adoption.
        with self._decider.starting() as start:
            alive = []
            for session in self._earlier.values():
                if self._watcher.watch(session.id, _identity(session)):
                    alive.append(session)
                else:
                    self._arena.remove_session(session.id)
            tier = self._new_tier(layout)
            tier.adopt(self._arena.entries(), alive)
            start(tier)

    def _new_tier(self, layout: RecordLayout) -> Tier:
        return Tier(
            layout,
            self._arena.regions,
            table=self._arena,
            policy=self._policy,
            # Ids of two lives differ, so a release that was meant for an earlier one is known.
            first_lease=self._arena.epoch << LIFE_BITS | 1,
        )

    def _refuse_foreign_sessions(self) -> None:
        own = own_pid_namespace()
        foreign = [s for s in self._earlier.values() if s.pid_namespace != own]
        if foreign:
            raise ArenaError(
                asked=f"adopt the arena {self._arena.path}",
                found=f"{foreign[0].client!r} of another pid namespace is attached, and nobody "
                "here can tell whether it lives",
                remedy="restart the pool in the workers' pid namespace, or remove the arena "
                f"with: rayhicache down {self._arena.path.parent.name}",
            )

    def _tick(self) -> None:
        """Without any traffic, leases still end at their deadlines."""
        with contextlib.suppress(TierClosed, SessionEnded), self._decider.deciding():
            pass


def check_slot(arena: Arena, ref: SlotRef) -> None:
    """Refuse a slot that the arena doesn't have.

    Raises:
        StaleSlot: naming it.
    """
    if not any(region.has(ref.slot) for region in arena.regions):
        raise StaleSlot(
            asked=f"use slot {ref.slot}",
            found=f"the arena has {[region.num_slots for region in arena.regions]} slots",
            remedy="name slots of this arena",
        )


def _identity(session: Session) -> ProcessIdentity:
    return ProcessIdentity(
        pid=session.pid,
        start_time=session.start_time,
        pid_namespace=session.pid_namespace,
        client=session.client,
    )


def _check_namespace(identity: ProcessIdentity) -> None:
    own = own_pid_namespace()
    if identity.pid_namespace != own:
        raise InvalidRequest(
            asked=f"attach {identity.client!r}, pid {identity.pid}",
            found=f"it lives in pid namespace {identity.pid_namespace}, the pool in {own}, so the "
            "pool can't see it die",
            remedy="run workers and pool in one pid namespace (one container, or share it)",
        )
