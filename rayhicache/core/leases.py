"""The leases of one life of a tier: who reads which records, and until when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayhicache.core.hits import Lease
from rayhicache.core.slotbook import SlotBook
from rayhicache.core.slots import SlotRef


class LeaseBook:
    """Grants and drops leases; each holds its slots in the slot book while it lasts.

    Args:
        first_lease: id of the first lease; the owner chooses it so that ids of two lives differ.
    """

    def __init__(self, book: SlotBook, first_lease: int) -> None:
        self._book = book
        self._leases: dict[int, Lease] = {}
        self._next = first_lease

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self, session: int, records: Mapping[str, Mapping[int, SlotRef]], deadline: float | None
    ) -> Lease:
        """A new lease on these records."""
        lease = Lease(id=self._next, session=session, records=records, deadline=deadline)
        self._next += 1
        self._leases[lease.id] = lease
        self._book.hold(lease.refs())
        return lease

    def get(self, lease: int) -> Lease | None:
        """The lease of that id, if it is held."""
        return self._leases.get(lease)

    def drop(self, lease: int) -> bool:
        """End a lease; False if it isn't held."""
        held = self._leases.pop(lease, None)
        if held is None:
            return False
        for ref in held.refs():
            self._book.unhold(ref.slot)
        return True

    def drop_session(self, session: int) -> None:
        """End all leases of a session."""
        for lease in [x.id for x in self._leases.values() if x.session == session]:
            self.drop(lease)

    def expire(self, now: float) -> int:
        """End the leases whose deadline has passed; how many."""
        late = [x.id for x in self._leases.values() if x.deadline is not None and x.deadline <= now]
        for lease in late:
            self.drop(lease)
        return len(late)

    def check(self, sessions: Iterable[int]) -> None:
        """Assert that the book's holds are the leases', each of an open session."""
        open_sessions = set(sessions)
        holds = [0] * len(self._book.slots)
        for lease in self._leases.values():
            assert lease.session in open_sessions
            for ref in lease.refs():
                holds[ref.slot] += 1
                assert self._book.ref(ref.slot) == ref
        assert holds == [slot.holds for slot in self._book.slots]
