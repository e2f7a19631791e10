"""What a pool asks of another node's pool: a lease on a prefix, and chunks of its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rayhicache.core.keys import PageKey
from rayhicache.core.slots import SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLease:
    """A prefix's records at their owner, held for a reader of another node.

    Attributes:
        seat: name of the owner.
        lease: its id there; it ends with `acknowledge` or its deadline.
        epoch: the owner's life.
        refs: of the records, in prefix order.
        digests: of each record, one per layer group.
    """

    seat: str
    lease: int
    epoch: int
    refs: tuple[SlotRef, ...]
    digests: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """Some leased records' bytes of one layer group.

    Attributes:
        lease, epoch: of the `PeerLease`.
        refs: of the records, in the order of the answer.
        layer_group: which run of each.
    """

    lease: int
    epoch: int
    refs: tuple[SlotRef, ...]
    layer_group: int


class Transport(Protocol):
    """The way to other nodes' pools. Any thread may call; every call ends within its limit.

    A fault (no answer in time, a dead or restarted owner, an answer that can't be used) is a
    `TransportError`; it costs the caller a recompute.
    """

    def lease(
        self, seat: str, keys: Sequence[PageKey], fingerprint: str, *, timeout: float
    ) -> PeerLease | None:
        """Lease the longest prefix of `keys` that the owner has; None if it has nothing.

        Args:
            fingerprint: of the asker's layout; an owner with another one has nothing for it.
        """

    def read(self, seat: str, request: ChunkRequest, *, timeout: float) -> bytes:
        """The bytes of one chunk: a run of each record, one after the other.

        The owner has checked, after reading, that the lease was still held in this life.
        """

    def acknowledge(
        self, seat: str, lease: int, suspects: Sequence[PageKey], *, timeout: float
    ) -> None:
        """End a lease. The owner forgets the records of `suspects`: nobody fails on them again."""
