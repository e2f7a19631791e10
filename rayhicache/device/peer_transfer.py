"""One transfer that the ranks of a group move together, and a rank's share of its plan."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from rayhicache.core.peers import NUMBER_BYTES, share_of, why_not_whole
from rayhicache.device.peer_group import PeerGroup, PeerSeat, Pusher
from rayhicache.device.staging import StagedPlan, StagedTransfer


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """One load or store that the ranks move together, as one of them sees it.

    Attributes:
        group, lane, number: which one.
        share: this rank's rows, and all rows of pools that aren't replicated.
        pushers: per pool, of each peer.
        whole: this rank has enqueued all of its part.
        last: words that reach `number` once no peer touches this rank's blocks, or the records,
            for this transfer any more.
    """

    group: PeerGroup
    lane: int
    number: int
    share: StagedPlan
    pushers: dict[str, list[tuple[int, Pusher]]] = field(default_factory=dict)
    whole: bool = False
    last: list[int] = field(default_factory=list)

    def why_not_whole(self) -> str:
        """Why a peer's part isn't there, or nothing. Once all have closed it."""
        if not self.whole:
            return ""  # the ticket has failed before, for a cause of its own
        group, board = self.group, self.group.board
        shape, own = board.shape, group.seat.rank
        for peer in group.seat.peers:
            cause = why_not_whole(
                self.number,
                peer,
                closed=board.word(shape.closed(self.lane, peer, own)),
                outcome=board.number(shape.outcome(self.lane, peer, self.number)),
            )
            if cause:
                return cause
        return ""


def share_of_plan(staged: StagedPlan, seat: PeerSeat, shared: Collection[str]) -> StagedPlan:
    """The plan of what a rank moves itself: its rows of the shared pools, and all of the others."""
    parts = tuple(
        _rows(t, share_of(t.count, seat.rank, seat.num_ranks)) if t.pool in shared else t
        for t in staged.transfers
    )
    return replace(
        staged,
        host_indices=parts[0].host_indices,
        device_indices=parts[0].device_indices,
        pool_transfers=parts[1:],
        transfers=parts,
    )


def raw(indices: torch.Tensor) -> bytes:
    """The bytes of `int64[n], host`."""
    return ctypes.string_at(indices.data_ptr(), NUMBER_BYTES * indices.numel())


def _rows(transfer: StagedTransfer, rows: range) -> StagedTransfer:
    count = transfer.count
    sides = (transfer.pinned[rows.start : rows.stop], transfer.pinned[count + rows.start :])
    return StagedTransfer(
        pool=transfer.pool,
        host_indices=transfer.host_indices[rows.start : rows.stop],
        device_indices=transfer.device_indices[rows.start : rows.stop],
        pinned=torch.cat((sides[0], sides[1][: len(rows)])),
        count=len(rows),
    )
