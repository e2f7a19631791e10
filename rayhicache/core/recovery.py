"""From one life of the owner to the next: copies in flight finish on memory nobody else gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayhicache.core.layout import RecordLayout
from rayhicache.core.leases import LeaseBook
from rayhicache.core.slotbook import SlotBook
from rayhicache.core.slots import Session, SlotEntry, SlotRef, SlotState


class Recovery:
    """Which processes of the earlier life have not told yet what they read and write."""

    def __init__(self, layout: RecordLayout, book: SlotBook, leases: LeaseBook) -> None:
        self._layout = layout
        self._book = book
        self._leases = leases
        self._pending: set[int] = set()
        self._granted: dict[int, int] = {}

    def adopt(self, entries: Iterable[tuple[int, SlotEntry]], sessions: Sequence[Session]) -> int:
        """See `Tier.adopt`."""
        assert not self._pending
        self._pending = {session.id for session in sessions}
        parts = [self._layout.shape(group.name).num_parts for group in self._layout.groups]
        ready = self._book.adopt(entries, parts)
        if not self._pending:
            self._book.settle_adopted()
        return ready

    def reattach(
        self, session: int, reading: Sequence[SlotRef], writing: Sequence[SlotRef], part: int
    ) -> int | None:
        """See `Tier.reattach`."""
        for ref in writing:
            self._book.claim(ref, session, part)
        records: dict[str, dict[int, SlotRef]] = {}
        for at, ref in enumerate(reading):
            slot = self._book.slots[ref.slot]
            readable = slot.state in (SlotState.READY, SlotState.SEALED)
            if readable and slot.generation == ref.generation:
                records.setdefault(self._layout.groups[slot.group].name, {})[at] = ref
        lease = self._leases.grant(session, records, None).id if records else None
        # The answer of an earlier call was lost, and with it the only one to release its lease.
        self._leases.drop(self._granted.pop(session, 0))
        if lease is not None:
            self._granted[session] = lease
        self.settle(session)
        return lease

    def end_session(self, session: int) -> None:
        """The process is gone, so it reads and writes nothing any more."""
        self._granted.pop(session, None)
        self.settle(session)

    def settle(self, session: int) -> None:
        """Nothing more is to be learnt from a session; with the last one, free what is unused."""
        if session in self._pending:
            self._pending.discard(session)
            if not self._pending:
                self._book.settle_adopted()

    def pending(self) -> tuple[int, ...]:
        """Sessions that have neither re-attached nor ended."""
        return tuple(sorted(self._pending))
