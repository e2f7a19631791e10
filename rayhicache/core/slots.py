"""Slots: places of the arena for one record each, and what the slot table says of them.

        reserve              commit (all parts)
FREE ─────────────► FILLING ────────────────────► READY ──┐
  ▲                    │ abort, filler gone         evict │
  │                    ▼                                  │
  ├──────────────── SEALED   (late copies may still land) │
  │  all parts passed                                     │
  └───────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from rayhicache.core.layout import RecordLayout
from rayhicache.errors import ArenaError


class SlotState(IntEnum):
    """FREE: nobody's. FILLING: one filler writes. READY: readers lease. SEALED: copies may land."""

    FREE = 0
    FILLING = 1
    READY = 2
    SEALED = 3


class SlotRef(NamedTuple):
    """A slot in one of its lives; stale as soon as the slot is reused."""

    slot: int
    generation: int


class SlotEntry(NamedTuple):
    """One entry of the slot table, as kept in the arena so that it outlives the owner.

    Attributes:
        state: of the slot.
        generation: how often the slot was reserved.
        group: number of the record group in the layout.
        key: of the page; empty when FREE.
        parent: key of the page before, empty for a first page.
        parts_open: bitmap of the parts that are neither committed nor passed.
        holder: session that fills it, 0 for none.
        digests: one per layer group, 64 bits each; empty until READY.
    """

    state: SlotState
    generation: int
    group: int
    key: bytes
    parent: bytes
    parts_open: int
    holder: int
    digests: tuple[int, ...]


class SlotTable(Protocol):
    """Where the tier's decisions about slots are kept: the arena, or nothing."""

    def put(self, slot: int, entry: SlotEntry) -> None:
        """Replace one entry. READY is put only after the record's bytes are there, so that a
        whole record is whole when the process dies at any instruction. Doesn't block.
        """


class NoTable:
    """A table that keeps nothing, for tiers that needn't outlive their process."""

    def put(self, slot: int, entry: SlotEntry) -> None:
        """Forget the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The part of the arena that holds one group's records.

    Attributes:
        group: name of the record group.
        first_slot: slot ids are unique over all regions; this region has [first_slot, +num_slots).
        num_slots: how many records fit.
        record_bytes: bytes from one slot to the next.
        offset: of the first slot's bytes in the arena's file.
    """

    group: str
    first_slot: int
    num_slots: int
    record_bytes: int
    offset: int

    def slot_offset(self, slot: int) -> int:
        """Offset of a slot's bytes in the arena's file."""
        return self.offset + (slot - self.first_slot) * self.record_bytes

    def has(self, slot: int) -> bool:
        """Whether the slot is of this region."""
        return self.first_slot <= slot < self.first_slot + self.num_slots


def divide_regions(
    layout: RecordLayout, *, data_offset: int, data_bytes: int
) -> tuple[Region, ...]:
    """Divide `data_bytes` of an arena among the groups of a layout by their shares.

    Raises:
        ArenaError: a group gets no slot.
    """
    total = sum(group.arena_share for group in layout.groups)
    regions: list[Region] = []
    offset, first = data_offset, 0
    for group in layout.groups:
        record_bytes = layout.shape(group.name).nbytes
        num_slots = int(data_bytes * group.arena_share / total) // record_bytes
        if num_slots < 1:
            raise ArenaError(
                asked=f"place records of {record_bytes:,} B of group {group.name!r}",
                found=f"its share of {data_bytes:,} B has no room for one",
                remedy="give the arena more bytes",
            )
        regions.append(
            Region(
                group=group.name,
                first_slot=first,
                num_slots=num_slots,
                record_bytes=record_bytes,
                offset=offset,
            )
        )
        offset += num_slots * record_bytes
        first += num_slots
    return tuple(regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One process that leases and fills: its end is the end of all it held.

    Attributes:
        id: unique in the tier's arena, never 0.
        pid, start_time: of the process; the start time tells a reused pid.
        pid_namespace: inode of the process's pid namespace.
        client: a name for people.
    """

    id: int
    pid: int
    start_time: int
    pid_namespace: int
    client: str


def slots_of(refs: Sequence[SlotRef]) -> tuple[int, ...]:
    """The slots of some references."""
    return tuple(ref.slot for ref in refs)
