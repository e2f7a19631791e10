"""The owner of an arena: one tier under one mutex, for all processes of the node.

    calls of any thread ─┐
    process watcher ─────┼─► mutex: Tier decides, Arena's tables follow ─► outbox ─► subscribers
    transports ──────────┘                                                          waiters

No I/O and no wait happens under the mutex. What is slow (digests of adopted records, mapping,
waiting) happens before or after it, on the caller's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields

from rayhicache.core.eviction import EvictionPolicy, PrefixLru
from rayhicache.core.hits import Hit, Lease
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.outcomes import Effects, Reserved, TierStats
from rayhicache.core.slots import Session, SlotRef, SlotState
from rayhicache.core.tier import Tier
from rayhicache.errors import StaleSlot, TierClosed
from rayhicache.memory.arena import Arena
from rayhicache.memory.decider import Decider
from rayhicache.memory.port import Attachment
from rayhicache.memory.process import ProcessIdentity
from rayhicache.memory.sessions import LIFE_BITS, SessionDesk, check_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedRecord:
    """A record of an earlier life that is about to be read for the first time.

    Attributes:
        layout, group: what its bytes mean.
        ref, key: whose bytes they should be.
        digests: as they were committed, one per layer group; empty if the filler made none.
        data: the record's bytes; leased while it is being checked, not to be kept.
    """

    layout: RecordLayout
    group: str
    ref: SlotRef
    key: PageKey
    digests: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Reattached:
    """The answer to `reattach`.

    `lease` covers every slot that the session said it reads, in place of all its leases of
    earlier lives; None if it reads none.
    """

    attachment: Attachment
    lease: int | None


class ArenaOwner:
    """The one who decides about an arena's slots. Every method may be called from any thread.

    Args:
        arena: taken; the owner closes it.
        verify: whether the digests of an adopted record are right; called without the mutex, on
            the thread of the first lookup that finds the record. None trusts adopted records.
        policy: of eviction.
        clock: seconds, for the deadlines of leases.

    Raises:
        ArenaError: processes of another pid namespace are attached to the adopted arena.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        verify: Callable[[AdoptedRecord], bool] | None = None,
        policy: Callable[[], EvictionPolicy] = PrefixLru,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self._verify = verify
        self._decider = Decider(arena.path, clock)
        self._deciding = self._decider.deciding
        self._looking = self._decider.looking
        self._desk = SessionDesk(arena, self._decider, policy)

    @property
    def epoch(self) -> int:
        """This life of the owner."""
        return self._arena.epoch

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena."""
        return self._arena.capacity_bytes

    @property
    def layout(self) -> RecordLayout | None:
        """The tier's layout, None until the first attach."""
        return self._arena.layout

    # ── sessions ────────────────────────────────────────────────────────────────────────────

    def attach(self, layout: RecordLayout, identity: ProcessIdentity) -> Attachment:
        """Open a session of a process; the first one fixes the layout.

        The session ends with `detach` or with the process.

        Raises:
            LayoutMismatch: the arena was made for another layout; names the first field.
            InvalidRequest: the process is of another pid namespace.
            SessionEnded: the process is gone already.
            ArenaError: no room for one record, or too many processes are attached.
        """
        return self._attachment(self._desk.attach(layout, identity))

    def reattach(
        self,
        session: int,
        identity: ProcessIdentity,
        *,
        reading: Sequence[SlotRef],
        writing: Sequence[SlotRef],
        part: int = 0,
    ) -> Reattached:
        """A session of an earlier life goes on, and names the slots of its open tickets.

        Should the answer be lost it may be called again; the lease is then replaced.

        Args:
            part: that the session writes of each record in `writing`.

        Raises:
            SessionEnded: there is no such session of that process any more; attach anew.
        """
        lease = self._desk.reattach(session, identity, reading=reading, writing=writing, part=part)
        return Reattached(attachment=self._attachment(session), lease=lease)

    def detach(self, session: int) -> None:
        """End a session and all that it holds. Idempotent; nothing happens once closed.

        The caller guarantees that no copy of the session can land or read any more.
        """
        self._desk.end(session)

    def sessions(self) -> tuple[Session, ...]:
        """The open sessions."""
        with self._looking() as tier:
            return tier.sessions() if tier else ()

    def recovering(self) -> tuple[int, ...]:
        """Sessions of an earlier life whose open tickets aren't known yet."""
        with self._looking() as tier:
            return tier.recovering() if tier else ()

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def lookup(
        self, keys: Sequence[PageKey], session: int, *, lease_seconds: float | None = None
    ) -> Hit:
        """Find and lease the restorable prefixes of a prompt; see `Tier.lookup`.

        Adopted records that nobody has read yet are verified first, on this thread; a bad one is
        forgotten, and the answer is as if it had never been there.

        Raises:
            SessionEnded: the session is not open.
        """
        while True:
            with self._deciding() as tier:
                hit = tier.lookup(
                    keys, session, now=self._decider.now(), lease_seconds=lease_seconds
                )
                refs = tier.unverified(hit.lease.refs()) if hit.lease else ()
                adopted = [self._adopted_record(tier, ref) for ref in refs]
            if hit.lease is None or self._verify is None or not adopted:
                return hit
            bad = [record for record in adopted if not self._verify(record)]
            with self._deciding() as tier:
                wrong = {record.ref for record in bad}
                tier.verified([record.ref for record in adopted if record.ref not in wrong])
                if not bad:
                    return hit
                tier.doubt([record.key for record in bad])
                # The session may have ended meanwhile, and its leases with it.
                if tier.lease(hit.lease.id) is not None:
                    tier.release(hit.lease.id)

    def release(self, lease: int) -> None:
        """Give a lease back, exactly once. One of an earlier life has ended: nothing happens.

        Raises:
            UnknownLease: it was released before or has passed its deadline.
        """
        if lease >> LIFE_BITS < self.epoch:
            return
        with self._deciding() as tier:
            tier.release(lease)

    def lease(self, lease: int) -> Lease | None:
        """The lease of that id, if it is held."""
        with self._deciding() as tier:
            return tier.lease(lease)

    def digests(self, refs: Sequence[SlotRef]) -> list[tuple[int, ...]]:
        """The digests of leased records, as they were committed."""
        with self._looking() as tier:
            assert tier is not None, "a lease is granted after the layout was fixed"
            return [tier.entry(ref.slot).digests for ref in refs]

    def doubt(self, keys: Sequence[PageKey]) -> int:
        """These records failed to load: nobody shall find them again; how many there were."""
        with self._deciding() as tier:
            return tier.doubt(keys)

    def count_present(self, keys: Sequence[PageKey], group: str = "full") -> int:
        """How many leading keys are READY. Leases and touches nothing."""
        with self._looking() as tier:
            return tier.count_present(keys, group) if tier else 0

    def view(self, ref: SlotRef, offset: int, nbytes: int) -> memoryview:
        """Some bytes of a record, writable, for transports.

        The caller holds a lease on the record, or fills it, until it has dropped the view.

        Raises:
            StaleSlot: the slot is in another life, or free.
        """
        with self._deciding() as tier:
            check_slot(self._arena, ref)
            entry = tier.entry(ref.slot)
            if entry.generation != ref.generation or entry.state is SlotState.FREE:
                raise StaleSlot(
                    asked=f"view slot {ref.slot} in generation {ref.generation}",
                    found=f"it is {entry.state.name} in generation {entry.generation}",
                    remedy="hold a lease while you read",
                )
            return self._arena.view(ref.slot, offset, nbytes)

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
        """Slots for the missing keys of one chunk, all or nothing; see `Tier.reserve`."""
        with self._deciding() as tier:
            return tier.reserve(keys, session, parent=parent, group=group, fillers=fillers)

    def commit(
        self,
        refs: Sequence[SlotRef],
        session: int,
        *,
        digests: Sequence[tuple[int, ...]] = (),
        part: int = 0,
    ) -> int:
        """The bytes are there, as seen by the host; how many turned READY. See `Tier.commit`."""
        with self._deciding() as tier:
            return tier.commit(refs, session, part=part, digests=digests)

    def abort(
        self, refs: Sequence[SlotRef], session: int, *, sealed: bool = False, part: int = 0
    ) -> None:
        """Give up filling; `sealed` if copies may still land. See `Tier.abort`."""
        with self._deciding() as tier:
            tier.abort(refs, session, part=part, sealed=sealed)

    def unseal(self, refs: Sequence[SlotRef], session: int, *, part: int = 0) -> None:
        """No copy into these slots can land any more. See `Tier.unseal`."""
        with self._deciding() as tier:
            tier.unseal(refs, session, part=part)

    def wait_for(
        self, keys: Sequence[PageKey], session: int, timeout: float, *, group: str = "full"
    ) -> bool:
        """Wait until keys that others fill are READY; whether all of `keys` are.

        Blocks the calling thread, for `timeout` seconds at most, without the mutex. False at once
        when one of them was aborted, is missing, or the session ends.
        """
        with self._deciding() as tier:
            waiter = tier.park(keys, session, group=group)
            if waiter is None:
                return tier.count_present(keys, group) == len(keys)
            future = self._decider.outbox.park(waiter, session)
        try:
            ready = future.result(timeout)
        except TimeoutError:
            return self._give_up(waiter, future)
        return ready and self.count_present(keys, group) == len(keys)

    def num_waiting(self) -> int:
        """How many calls of `wait_for` are parked."""
        with self._looking():
            return self._decider.outbox.num_parked()

    # ── the tier as a whole ─────────────────────────────────────────────────────────────────

    def subscribe(self, callback: Callable[[Effects], None]) -> None:
        """Tell of records stored and removed, in order, after the fact; see `Outbox.subscribe`."""
        with self._looking():
            self._decider.outbox.subscribe(callback)

    def ready_keys(self) -> list[tuple[str, PageKey]]:
        """All records that can be found, as (group, key)."""
        with self._looking() as tier:
            return tier.ready_keys() if tier else []

    def stats(self) -> TierStats:
        """Counts of this life; all 0 before the first attach."""
        with self._looking() as tier:
            if tier is not None:
                return tier.stats()
        return TierStats(**dict.fromkeys((field.name for field in fields(TierStats)), 0))

    def check(self) -> None:
        """Assert that the tier is consistent and that the arena's table says what it says."""
        with self._deciding() as tier:
            tier.check()
            for slot, entry in self._arena.entries():
                assert entry == tier.entry(slot)

    def close(self, *, unlink: bool) -> None:
        """Stop deciding. Idempotent; waits for the watcher's thread, which never waits long.

        Args:
            unlink: remove the arena's file. Otherwise everything stays as it is, sessions too,
                just as after a crash, and the next owner of the seat adopts it.
        """
        if not self._desk.close():
            return
        if unlink:
            self._arena.unlink()
        else:
            self._arena.close()

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _give_up(self, waiter: int, future: Future[bool]) -> bool:
        with contextlib.suppress(TierClosed), self._deciding() as tier:
            tier.unpark(waiter)
            self._decider.outbox.forget(waiter)
        # It may have been settled between the time-out and the mutex.
        return future.done() and future.result()

    def _adopted_record(self, tier: Tier, ref: SlotRef) -> AdoptedRecord:
        entry = tier.entry(ref.slot)
        region = tier.regions[entry.group]
        return AdoptedRecord(
            layout=tier.layout,
            group=region.group,
            ref=ref,
            key=PageKey(entry.key),
            digests=entry.digests,
            data=self._arena.view(ref.slot, 0, region.record_bytes),
        )

    def _attachment(self, session: int) -> Attachment:
        return Attachment(
            session=session,
            epoch=self.epoch,
            path=str(self._arena.path),
            inode=self._arena.inode,
            uuid=self._arena.uuid,
            regions=self._arena.regions,
        )
