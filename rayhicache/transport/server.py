"""The owner's side of every transport: leases for other nodes, and chunks of leased records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayhicache.core.keys import PageKey
from rayhicache.errors import StaleSlot, TransportError, UnknownLease
from rayhicache.memory.owner import ArenaOwner
from rayhicache.transport.protocol import ChunkRequest, PeerLease


class PeerServer:
    """Answers other nodes' pools. Any thread may call; no call waits for a peer.

    Args:
        seat: name of this pool.
        session: the pool's own session, which holds the leases of remote readers.
        lease_seconds: after which a reader that says nothing more loses its lease.
    """

    def __init__(
        self, owner: ArenaOwner, seat: str, session: Callable[[], int], *, lease_seconds: float
    ) -> None:
        self._owner = owner
        self._seat = seat
        self._session = session
        self._lease_seconds = lease_seconds

    def lease(self, keys: Sequence[PageKey], fingerprint: str) -> PeerLease | None:
        """See `Transport.lease`."""
        layout = self._owner.layout
        if layout is None or layout.fingerprint() != fingerprint:
            return None
        hit = self._owner.lookup(keys, self._session(), lease_seconds=self._lease_seconds)
        if hit.lease is None:
            return None
        records = hit.lease.records[layout.groups[0].name]
        refs = tuple(records[page] for page in sorted(records))
        return PeerLease(
            seat=self._seat,
            lease=hit.lease.id,
            epoch=self._owner.epoch,
            refs=refs,
            digests=tuple(self._owner.digests(refs)),
        )

    def read(self, request: ChunkRequest) -> bytes:
        """See `Transport.read`: the lease is checked again after the bytes were copied.

        Raises:
            TransportError: the request is of another life, its lease has ended, or it asks for
                what the lease doesn't hold.
        """
        layout = self._owner.layout
        self._check(request, "before")
        assert layout is not None, "a lease is granted after the layout was fixed"
        runs = layout.shape(layout.groups[0].name).group_runs
        if not 0 <= request.layer_group < len(runs):
            raise _refused(request, f"there are {len(runs)} layer groups")
        run = runs[request.layer_group]
        try:
            payload = b"".join(
                self._owner.view(ref, run.offset, run.nbytes) for ref in request.refs
            )
        except StaleSlot as fault:
            raise _refused(request, "its lease ended during the read") from fault
        self._check(request, "after")
        return payload

    def acknowledge(self, lease: int, suspects: Sequence[PageKey]) -> None:
        """See `Transport.acknowledge`. A lease that has ended already is no fault."""
        if suspects:
            self._owner.doubt(suspects)
        try:
            self._owner.release(lease)
        except UnknownLease:
            return  # its deadline came first; there is nothing left to end

    def _check(self, request: ChunkRequest, when: str) -> None:
        if request.epoch != self._owner.epoch:
            raise _refused(request, f"the pool is in epoch {self._owner.epoch}")
        # Without a layout nobody has attached in this life, so nothing is leased.
        held = self._owner.lease(request.lease) if self._owner.layout is not None else None
        if held is None:
            raise _refused(request, f"its lease had ended {when} the read")
        if not set(request.refs) <= set(held.refs()):
            raise _refused(request, "it asks for records that its lease doesn't hold")


def _refused(request: ChunkRequest, found: str) -> TransportError:
    return TransportError(
        asked=f"read layer group {request.layer_group} of {len(request.refs)} records under "
        f"lease {request.lease} of epoch {request.epoch}",
        found=found,
        remedy="drop the pull and compute the pages",
    )
