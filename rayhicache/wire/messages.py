"""The messages about pages, and how lists of keys travel.

Rooms above this one register their own beside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayhicache.core.directory import Announcement
from rayhicache.core.hits import Hit, Lease
from rayhicache.core.keys import KEY_BYTES, PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.outcomes import Reserved, TierStats
from rayhicache.core.slots import Region, Session, SlotRef
from rayhicache.wire.codec import register
from rayhicache.wire.fields import refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """References to slots, to abort or to unseal."""

    refs: tuple[SlotRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The bytes of these records are there; `digests` has one tuple per record, or none."""

    refs: tuple[SlotRef, ...]
    digests: tuple[tuple[int, ...], ...]


MESSAGES: dict[str, type] = {
    "layout": RecordLayout,
    "session": Session,
    "region": Region,
    "hit": Hit,
    "lease": Lease,
    "reserved": Reserved,
    "stats": TierStats,
    "announcement": Announcement,
    "refs": Refs,
    "commit": Commit,
}
register(MESSAGES)


def pack_keys(keys: Sequence[PageKey]) -> bytes:
    """Keys as one blob, 16 bytes each.

    Raises:
        MessageError: a key of another length.
    """
    if any(len(key) != KEY_BYTES for key in keys):
        raise refused(f"a page key that hasn't {KEY_BYTES} bytes")
    return b"".join(keys)


def unpack_keys(blob: bytes) -> list[PageKey]:
    """The keys of a blob.

    Raises:
        MessageError: it doesn't divide into keys.
    """
    if len(blob) % KEY_BYTES:
        raise refused(f"{len(blob)} B of keys of {KEY_BYTES} B")
    return [PageKey(blob[at : at + KEY_BYTES]) for at in range(0, len(blob), KEY_BYTES)]
