"""Who may end a filling: checked for all records of a call before any of them changes."""

from __future__ import annotations

from collections.abc import Sequence

from rayhicache.core.slotbook import SlotBook
from rayhicache.core.slots import SlotRef, SlotState
from rayhicache.errors import InvalidRequest, StaleSlot


def check_filler(
    book: SlotBook, refs: Sequence[SlotRef], session: int, part: int, *, sealed: bool = False
) -> None:
    """Refuse references whose part the session doesn't write.

    Args:
        sealed: the records must be given up already.

    Raises:
        StaleSlot: naming the first such slot.
    """
    seen: set[SlotRef] = set()
    for ref in refs:
        if ref in seen:
            raise _stale(ref, "it was named twice in one call")
        seen.add(ref)
        if not 0 <= ref.slot < len(book.slots):
            raise _stale(ref, f"slots are 0 to {len(book.slots) - 1}")
        slot = book.slots[ref.slot]
        if slot.generation != ref.generation:
            raise _stale(ref, f"the slot is in generation {slot.generation}")
        if slot.state not in (SlotState.FILLING, SlotState.SEALED):
            raise _stale(ref, f"the slot is {slot.state.name}")
        if not 0 <= part < len(slot.fillers) or slot.fillers[part] != session:
            raise _stale(ref, f"session {session} doesn't fill part {part}")
        if not slot.parts_open >> part & 1:
            raise _stale(ref, f"part {part} was committed or passed before")
        if sealed and slot.state is not SlotState.SEALED:
            raise _stale(ref, "it is being filled, not sealed")


def check_digests(
    refs: Sequence[SlotRef], digests: Sequence[tuple[int, ...]], wanted: Sequence[int]
) -> None:
    """Refuse digests that don't fit the records, unless there are none at all.

    Args:
        wanted: layer groups of each record.

    Raises:
        InvalidRequest: too many or too few.
    """
    if digests and [len(digest) for digest in digests] != list(wanted):
        raise InvalidRequest(
            asked=f"commit {len(refs)} records",
            found=f"{len(digests)} tuples of digests, of {sorted({*map(len, digests)})} each",
            remedy="give one per record with one digest per layer group, or none",
        )


def _stale(ref: SlotRef, found: str) -> StaleSlot:
    return StaleSlot(
        asked=f"fill slot {ref.slot} in generation {ref.generation}",
        found=found,
        remedy="drop the reference; the record is lost and will be stored again",
    )
