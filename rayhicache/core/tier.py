"""The tier: who may fill, read or evict which slot. One object decides, under one mutex.

Every method takes what it needs and returns values; what others must be told (records stored
and removed, waiters to wake) is collected and taken with `drain()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rayhicache.core.eviction import EvictionPolicy, PrefixLru
from rayhicache.core.fillers import check_digests, check_filler
from rayhicache.core.hits import MISS, Hit, Lease, pages_to_lease, restorable_lengths
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.leases import LeaseBook
from rayhicache.core.outcomes import Effects, Fill, Reserved, TierStats, Wake
from rayhicache.core.recovery import Recovery
from rayhicache.core.slotbook import NO_KEY, SlotBook, parts_of
from rayhicache.core.slots import (
    NoTable,
    Region,
    Session,
    SlotEntry,
    SlotRef,
    SlotState,
    SlotTable,
)
from rayhicache.core.waiting import WaitingRoom
from rayhicache.errors import SessionEnded, UnknownLease

__all__ = ["Effects", "Fill", "Reserved", "Tier", "TierStats", "Wake"]


class Tier:
    """The slots of one arena. Not thread-safe: the owner holds one mutex around every call."""

    def __init__(
        self,
        layout: RecordLayout,
        regions: Sequence[Region],
        *,
        table: SlotTable | None = None,
        policy: Callable[[], EvictionPolicy] = PrefixLru,
        first_lease: int = 1,
    ) -> None:
        self.layout = layout
        self.regions = tuple(regions)
        self._waiting = WaitingRoom()
        self._book = SlotBook(
            layout, regions, table if table is not None else NoTable(), policy, self._waiting.settle
        )
        self._numbers = {group.name: number for number, group in enumerate(layout.groups)}
        self._shapes = [layout.shape(group.name) for group in layout.groups]
        self._sessions: dict[int, Session] = {}
        self._leases = LeaseBook(self._book, first_lease)
        self._recovery = Recovery(layout, self._book, self._leases)
        self._hit_pages = 0
        self._miss_pages = 0

    # ── sessions ────────────────────────────────────────────────────────────────────────────

    def open_session(self, session: Session) -> None:
        """Admit a process; its id must be new."""
        assert session.id
        assert session.id not in self._sessions
        self._sessions[session.id] = session

    def sessions(self) -> tuple[Session, ...]:
        """The open sessions."""
        return tuple(self._sessions.values())

    def end_session(self, session: int) -> None:
        """The session's process is gone, so no copy of it can land: free all that it held.

        Leases are released, what it was filling or had sealed passes, its waiters are forgotten.
        A part that it had committed is there and stays. Ending a session twice does nothing.
        """
        if self._sessions.pop(session, None) is None and session not in self._recovery.pending():
            return
        self._leases.drop_session(session)
        self._waiting.unpark_session(session)
        for number, slot in enumerate(self._book.slots):
            mask = parts_of(slot.fillers, session) & slot.parts_open
            if mask:
                self._book.pass_parts(number, mask)
        self._recovery.end_session(session)

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def lookup(
        self,
        keys: Sequence[PageKey],
        session: int,
        *,
        now: float,
        lease_seconds: float | None = None,
    ) -> Hit:
        """Find the restorable prefixes of a prompt and lease what they need, in one step.

        Args:
            keys: prefix order, of the pages that may be used (a prompt's last token never is).
            session: who reads.
            now: seconds on the tier's clock.
            lease_seconds: the lease's limit, for readers of other nodes.

        Raises:
            SessionEnded: the session is not open.
        """
        self._check_session(session)
        present = {
            name: map(self._book.groups[number].index.__contains__, keys)
            for name, number in self._numbers.items()
        }
        lengths = restorable_lengths(self.layout, len(keys), present)
        best = lengths[-1] if lengths else 0
        self._hit_pages += best
        self._miss_pages += len(keys) - best
        if not lengths:
            return MISS
        records: dict[str, dict[int, SlotRef]] = {}
        for name, pages in pages_to_lease(self.layout, lengths).items():
            book = self._book.groups[self._numbers[name]]
            refs = self._book.refs(book.index[keys[page]] for page in pages)
            records[name] = dict(zip(pages, refs, strict=True))
            book.policy.touch([keys[page] for page in pages])
        deadline = None if lease_seconds is None else now + lease_seconds
        return Hit(lengths=lengths, lease=self._leases.grant(session, records, deadline))

    def release(self, lease: int) -> None:
        """Give a lease back, exactly once.

        Raises:
            UnknownLease: released before, past its deadline, or of an earlier life.
        """
        if not self._leases.drop(lease):
            raise UnknownLease(
                asked=f"release lease {lease}",
                found="it isn't held",
                remedy="release each lease once; leases end with their session or deadline",
            )

    def lease(self, lease: int) -> Lease | None:
        """The lease of that id, if it is held."""
        return self._leases.get(lease)

    def expire(self, now: float) -> int:
        """Release the leases whose deadline has passed; how many."""
        return self._leases.expire(now)

    def doubt(self, keys: Sequence[PageKey]) -> int:
        """Forget records that failed to load, so that nobody fails on them again; how many.

        Records that are leased stay until their leases end, but are not found any more.
        """
        found = [
            group.index[key]
            for group in self._book.groups
            for key in dict.fromkeys(keys)
            if key in group.index
        ]
        for slot in found:
            self._book.remove(slot)
        return len(found)

    # ── filling ─────────────────────────────────────────────────────────────────────────────

    def reserve(
        self,
        keys: Sequence[PageKey],
        session: int,
        *,
        parent: PageKey | None = None,
        group: str = "full",
        fillers: tuple[int, ...] | None = None,
    ) -> Reserved | None:
        """Reserve a slot for each missing key of one prefill chunk, so that it can be filled.

        All or nothing: on None nothing changed. Records that nobody holds are evicted in policy
        order; the chunk's own ready pages and its parent are not.

        Args:
            keys: prefix order, no repeats.
            session: the filler; its end aborts what it has not committed.
            parent: key of the page before the chunk.
            group: the record group.
            fillers: the session that fills each part, `session` for all by default.

        Returns:
            What to fill and what needs no filling, or None when evicting every unheld record
            is not enough.

        Raises:
            SessionEnded: a filler's session is not open.
        """
        number = self._numbers[group]
        book = self._book.groups[number]
        fillers = fillers or (session,) * self._shapes[number].num_parts
        assert len(fillers) == self._shapes[number].num_parts
        assert len(set(keys)) == len(keys)
        for filler in (session, *fillers):
            self._check_session(filler)
        filling = tuple(key for key in keys if key in book.filling)
        missing = [key for key in keys if key not in book.index and key not in book.filling]
        keep = {*keys, parent or NO_KEY}
        if not self._book.make_room(number, len(missing), keep):
            return None
        parents = dict(zip(keys, (parent or NO_KEY, *keys), strict=False))
        refs = [self._book.reserve(number, key, parents[key], fillers) for key in missing]
        fills = [Fill(group=group, key=k, ref=r) for k, r in zip(missing, refs, strict=True)]
        ready = tuple(key for key in keys if key in book.index)
        return Reserved(fills=tuple(fills), ready=ready, filling=filling)

    def commit(
        self,
        refs: Sequence[SlotRef],
        session: int,
        *,
        part: int = 0,
        digests: Sequence[tuple[int, ...]] = (),
    ) -> int:
        """The session's part of these records is there; READY when it was the last part.

        The caller guarantees that the bytes have landed, as seen by the host. A part of a record
        that another part aborted passes instead.

        Args:
            digests: one tuple per record, one number per layer group, or none at all if the
                filler makes no digests.

        Returns:
            How many records turned READY.

        Raises:
            StaleSlot: a reference that this session doesn't fill; nothing was committed.
            InvalidRequest: too many or too few digests; nothing was committed.
        """
        check_filler(self._book, refs, session, part)
        groups = [self._book.slots[ref.slot].group for ref in refs]
        check_digests(refs, digests, [len(self._shapes[group].group_runs) for group in groups])
        stored = 0
        for ref, digest in zip(refs, digests or ((),) * len(refs), strict=True):
            if self._book.slots[ref.slot].state is SlotState.SEALED:
                self._book.pass_parts(ref.slot, 1 << part)
            else:
                stored += self._book.close_part(ref.slot, part, digest)
        return stored

    def abort(
        self, refs: Sequence[SlotRef], session: int, *, part: int = 0, sealed: bool = False
    ) -> None:
        """Give up filling these records.

        Args:
            sealed: copies may still land in this part; `unseal` tells when they no longer can.

        Raises:
            StaleSlot: a reference that this session doesn't fill; nothing was aborted.
        """
        check_filler(self._book, refs, session, part)
        for ref in refs:
            self._book.pass_parts(ref.slot, 0 if sealed else 1 << part)

    def unseal(self, refs: Sequence[SlotRef], session: int, *, part: int = 0) -> None:
        """No copy of this session's part can land any more.

        Raises:
            StaleSlot: a reference that this session doesn't hold sealed; nothing was unsealed.
        """
        check_filler(self._book, refs, session, part, sealed=True)
        for ref in refs:
            self._book.pass_parts(ref.slot, 1 << part)

    def park(self, keys: Sequence[PageKey], session: int, *, group: str = "full") -> int | None:
        """Wait for keys that others fill: a `Wake` with this id follows; None if none is filling.

        The waiter is woken when every key is READY, or as soon as one was aborted.
        """
        self._check_session(session)
        number = self._numbers[group]
        waiting = [(number, key) for key in keys if key in self._book.groups[number].filling]
        return self._waiting.park(waiting, session) if waiting else None

    def unpark(self, waiter: int) -> None:
        """Forget a waiter whose time is up; no wake follows."""
        self._waiting.unpark(waiter)

    # ── another life ────────────────────────────────────────────────────────────────────────

    def adopt(self, entries: Iterable[tuple[int, SlotEntry]], sessions: Sequence[Session]) -> int:
        """Take over the table of an earlier life, before any other call; how many can be found.

        READY records can be found at once, unverified. What was FILLING or SEALED stays sealed,
        and nothing adopted is evicted or freed, until each of `sessions` has re-attached or has
        ended: copies in flight finish on memory that nobody else gets.
        """
        assert not self._sessions
        return self._recovery.adopt(entries, sessions)

    def reattach(
        self,
        session: Session,
        *,
        reading: Sequence[SlotRef],
        writing: Sequence[SlotRef],
        part: int = 0,
    ) -> int | None:
        """A session of the earlier life names the slots of its open tickets.

        It may be told again, should the answer be lost; the lease of the first answer is then
        replaced.

        Args:
            part: that the session writes of each record in `writing`.

        Returns:
            A lease on the slots that it reads, None if it reads none. What it writes stays
            sealed until its `unseal`.
        """
        if session.id not in self._sessions:
            self.open_session(session)
        return self._recovery.reattach(session.id, reading, writing, part)

    def recovering(self) -> tuple[int, ...]:
        """Sessions of the earlier life that have neither re-attached nor ended."""
        return self._recovery.pending()

    def unverified(self, refs: Iterable[SlotRef]) -> tuple[SlotRef, ...]:
        """Those of some records that were adopted and whose digests were not checked since."""
        return tuple(ref for ref in refs if self._book.slots[ref.slot].unverified)

    def verified(self, refs: Iterable[SlotRef]) -> None:
        """The digests of these adopted records were right."""
        for ref in refs:
            if self._book.ref(ref.slot) == ref:
                self._book.slots[ref.slot].unverified = False

    # ── what others see ─────────────────────────────────────────────────────────────────────

    def entry(self, slot: int) -> SlotEntry:
        """What the slot table says of a slot."""
        return self._book.entry(slot)

    def count_present(self, keys: Sequence[PageKey], group: str = "full") -> int:
        """How many leading keys are READY. Leases and touches nothing."""
        index = self._book.groups[self._numbers[group]].index
        return next((at for at, key in enumerate(keys) if key not in index), len(keys))

    def ready_keys(self) -> list[tuple[str, PageKey]]:
        """All records that can be found, as (group, key)."""
        return [(g.region.group, key) for g in self._book.groups for key in g.index]

    def stats(self) -> TierStats:
        """Counts by state and sums since the start. O(slots)."""
        states = [slot.state for slot in self._book.slots]
        return TierStats(
            slots=len(states),
            free=states.count(SlotState.FREE),
            filling=states.count(SlotState.FILLING),
            ready=states.count(SlotState.READY),
            sealed=states.count(SlotState.SEALED),
            leased=sum(slot.holds > 0 for slot in self._book.slots),
            leases=len(self._leases),
            sessions=len(self._sessions),
            hit_pages=self._hit_pages,
            miss_pages=self._miss_pages,
            stored_pages=self._book.num_stored,
            evicted_pages=self._book.num_evicted,
        )

    def drain(self) -> Effects:
        """Take what happened since the last call."""
        stored, removed = tuple(self._book.stored), tuple(self._book.removed)
        effects = Effects(stored=stored, removed=removed, wakes=tuple(self._waiting.wakes))
        self._book.stored.clear()
        self._book.removed.clear()
        self._waiting.wakes.clear()
        return effects

    def check(self) -> None:
        """Assert conservation; called after each step of every test."""
        self._book.check()
        self._waiting.check(lambda group, key: key in self._book.groups[group].filling)
        self._leases.check(self._sessions)
        known = {0, *self._sessions}
        for slot in self._book.slots:
            assert self._recovery.pending() or not slot.adopted
            assert known.issuperset(
                filler for at, filler in enumerate(slot.fillers) if slot.parts_open >> at & 1
            )

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _check_session(self, session: int) -> None:
        if session not in self._sessions:
            raise SessionEnded(
                asked=f"act for session {session}",
                found="it is not open",
                remedy="attach again; its leases are gone",
            )
