"""An owner that lives in the same process, and the way to it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.outcomes import Reserved
from rayhicache.core.slots import SlotRef
from rayhicache.errors import PoolUnreachable, SessionEnded, TierClosed
from rayhicache.memory.arena import Arena
from rayhicache.memory.open_leases import OpenLeases
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.port import Attachment, OpenSlots
from rayhicache.memory.process import this_process
from rayhicache.memory.sessions import LIFE_BITS

ARENA_BYTES = 32 << 20


@contextlib.contextmanager
def arena_owner(
    capacity_bytes: int = ARENA_BYTES, *, folder: str | None = None
) -> Iterator[ArenaOwner]:
    """The owner of an arena of its own in this process; both are gone afterwards.

    Args:
        folder: that exists, on tmpfs where copies have to be fast; None for the system's
            temporary one.

    Raises:
        ArenaTooLarge: it doesn't fit.
    """
    with tempfile.TemporaryDirectory(prefix="rhc-", dir=folder) as own:
        owner = ArenaOwner(Arena.create_or_adopt(Path(own), "local", "here", capacity_bytes))
        try:
            yield owner
        finally:
            owner.close(unlink=True)


class LocalPort:
    """A `Port` without a network: calls go straight to the owner and none waits for another.

    Args:
        owner: of the arena; not closed by the port.
        client: a name for people.
    """

    def __init__(self, owner: ArenaOwner, *, client: str = "local") -> None:
        self._owner = owner
        self._client = client
        self._session: int | None = None
        self._open_slots: Callable[[], OpenSlots] | None = None
        self._leases = OpenLeases()

    def attach(self, layout: RecordLayout, open_slots: Callable[[], OpenSlots]) -> Attachment:
        """See `Port.attach`."""
        assert self._session is None, "a port has one session"
        with self._reaching() as owner:
            attachment = owner.attach(layout, this_process(self._client))
        self._session = attachment.session
        self._open_slots = open_slots
        return attachment

    def reconnect(self, owner: ArenaOwner) -> Attachment:
        """The owner was restarted: go on with its successor, on the calling thread.

        Raises:
            SessionEnded: the successor doesn't know the session; what it held is gone.
        """
        assert self._open_slots is not None
        self._owner = owner
        slots = self._open_slots()
        with self._reaching():
            again = owner.reattach(
                self._opened(),
                this_process(self._client),
                reading=slots.reading,
                writing=slots.writing,
            )
            first_lease = again.attachment.epoch << LIFE_BITS
            surplus = self._leases.recovered(again.lease, first_lease=first_lease)
            if surplus is not None:
                owner.release(surplus)
        return again.attachment

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        """See `Port.lookup`; only this node's records are found."""
        with self._reaching() as owner:
            hit = owner.lookup(keys, self._opened())
        if hit.lease is not None:
            self._leases.granted(hit.lease.id)
        return hit

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        """See `Port.reserve`."""
        with self._reaching() as owner:
            return owner.reserve(keys, self._opened(), parent=parent, group=group)

    def commit(self, refs: Sequence[SlotRef], digests: Sequence[tuple[int, ...]]) -> int:
        """See `Port.commit`."""
        with self._reaching() as owner:
            return owner.commit(refs, self._opened(), digests=digests)

    def abort(self, refs: Sequence[SlotRef], *, sealed: bool) -> None:
        """See `Port.abort`."""
        with self._reaching() as owner:
            owner.abort(refs, self._opened(), sealed=sealed)

    def unseal(self, refs: Sequence[SlotRef]) -> None:
        """See `Port.unseal`."""
        with self._reaching() as owner:
            owner.unseal(refs, self._opened())

    def release(self, lease: int) -> None:
        """See `Port.release`."""
        at_owner = self._leases.released(lease)
        if at_owner is not None:
            with self._reaching() as owner:
                owner.release(at_owner)

    def doubt(self, keys: Sequence[PageKey]) -> None:
        """See `Port.doubt`."""
        with self._reaching() as owner:
            owner.doubt(keys)

    def close(self) -> None:
        """See `Port.close`."""
        session, self._session = self._session, None
        if session is not None:
            self._owner.detach(session)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[ArenaOwner]:
        try:
            yield self._owner
        except TierClosed as fault:
            raise PoolUnreachable(
                asked=f"reach the pool of {self._client!r}",
                found="it is closed",
                remedy="go on without the tier, or reconnect to its successor",
            ) from fault

    def _opened(self) -> int:
        if self._session is None:
            raise SessionEnded(
                asked=f"use the port of {self._client!r}",
                found="it is not attached",
                remedy="attach first, and don't use it after close",
            )
        return self._session
