"""What the tier answers: values only."""

from __future__ import annotations

from dataclasses import dataclass

from rayhicache.core.keys import PageKey
from rayhicache.core.slots import SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A slot that its session must fill and then commit or abort."""

    group: str
    key: PageKey
    ref: SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The answer to `reserve`: slots to fill, and the keys that need no filling.

    `ready` are there; `filling` are being filled by somebody, who may yet abort.
    """

    fills: tuple[Fill, ...]
    ready: tuple[PageKey, ...]
    filling: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """A parked waiter whose keys are all READY (`ready`), or never will be."""

    waiter: int
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What happened since the last `drain`, in order.

    `stored` and `removed` are (group, key) pairs; a key may be in both.
    """

    stored: tuple[tuple[str, PageKey], ...]
    removed: tuple[tuple[str, PageKey], ...]
    wakes: tuple[Wake, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counts of one life of a tier; slots now, and sums since its start.

    `leased` slots are a part of `ready`.
    """

    slots: int
    free: int
    filling: int
    ready: int
    sealed: int
    leased: int
    leases: int
    sessions: int
    hit_pages: int
    miss_pages: int
    stored_pages: int
    evicted_pages: int
