"""What lies where in an arena's file. All integers are little-endian.

    | header page | layout (msgpack) | attachments | slot table | key index | records ...
    0             4096               20480         53248                    data_offset

The header's identity is written once, its magic last. The epoch is one word. The rest of the
header says how the file is divided; it is valid only with its check word, which is written
last. A slot's entry and an attachment carry check words of their own.

A process that is killed stops between two stores, and no store here is narrower than the
aligned word it changes. So a kill leaves each word old or new, and an entry either whole or with
a check word that doesn't fit.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from rayhicache.core.keys import KEY_BYTES
from rayhicache.core.layout import LAYER_GROUPS_MAX
from rayhicache.core.slots import Session, SlotEntry, SlotState

MAGIC = b"RHCARENA"
VERSION = 1
PAGE_BYTES = 4096
LAYOUT_OFFSET = PAGE_BYTES
LAYOUT_BYTES_MAX = 4 * PAGE_BYTES
SESSIONS_OFFSET = LAYOUT_OFFSET + LAYOUT_BYTES_MAX
SESSION_BYTES = 128
SESSIONS_MAX = 256
TABLE_OFFSET = SESSIONS_OFFSET + SESSIONS_MAX * SESSION_BYTES
WORD_BYTES = 8
CELL_BYTES = 16
CLIENT_BYTES_MAX = 80

_IDENTITY = struct.Struct("<8sQQ16sQ")
_EPOCH_OFFSET = 64
_DIVISION_OFFSET = 128
_DIVISION = struct.Struct("<16sQQQQ")
_ENTRY = struct.Struct(f"<QQIBBBB{KEY_BYTES}s{KEY_BYTES}s{LAYER_GROUPS_MAX}Q")
_SESSION = struct.Struct(f"<QQQQ{CLIENT_BYTES_MAX}s")
_WORD = struct.Struct("<Q")

ENTRY_BYTES = WORD_BYTES + _ENTRY.size
_FRESH_ENTRY = bytes(ENTRY_BYTES)
_HAS_KEY, _HAS_PARENT = 1, 2


def check_word(data: bytes, place: int = 0) -> int:
    """64 bits over some bytes and the number of the place where they lie."""
    salt = place.to_bytes(16, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which file this is: written once, when the arena is made."""

    version: int
    capacity_bytes: int
    uuid: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the file is divided, from the first attach on.

    Attributes:
        fingerprint: of the layout, 16 bytes.
        layout_bytes: length of the encoded layout.
        num_slots: entries of the slot table.
        num_cells: cells of the key index.
        data_offset: of the first record.
    """

    fingerprint: bytes
    layout_bytes: int
    num_slots: int
    num_cells: int
    data_offset: int

    @property
    def index_offset(self) -> int:
        """Where the key index lies: behind the slot table."""
        return index_offset(self.num_slots)


def index_offset(num_slots: int) -> int:
    """Where the key index lies when the table has so many slots."""
    return TABLE_OFFSET + num_slots * ENTRY_BYTES


def data_offset(num_slots: int) -> int:
    """Where the records lie when there are so many slots; on a page."""
    end = index_offset(num_slots) + num_cells(num_slots) * CELL_BYTES
    return -(-end // PAGE_BYTES) * PAGE_BYTES


def num_cells(num_slots: int) -> int:
    """Cells of a key index that is never more than half full."""
    return 2 * num_slots + 1


def write_identity(buffer: memoryview, identity: Identity) -> None:
    """Make the file an arena; the magic is stored last, so a file with it is complete."""
    packed = _packed_identity(identity)
    buffer[len(MAGIC) : len(packed)] = packed[len(MAGIC) :]
    buffer[: len(MAGIC)] = MAGIC


def read_magic(buffer: memoryview) -> bytes:
    """The first word of the file: `MAGIC`, or zeros when its making was cut off."""
    return bytes(buffer[: len(MAGIC)])


def read_identity(buffer: memoryview) -> Identity | None:
    """The identity, or None when the magic or the check word is wrong."""
    magic, version, capacity, uuid, _ = _IDENTITY.unpack_from(buffer, 0)
    identity = Identity(version=version, capacity_bytes=capacity, uuid=uuid)
    whole = bytes(buffer[: _IDENTITY.size]) == _packed_identity(identity)
    return identity if magic == MAGIC and whole else None


def _packed_identity(identity: Identity) -> bytes:
    fields = (MAGIC, identity.version, identity.capacity_bytes, identity.uuid)
    return _IDENTITY.pack(*fields, check_word(_IDENTITY.pack(*fields, 0)))


def read_epoch(buffer: memoryview) -> int:
    """The life of the owner; 0 before the first."""
    return int(_WORD.unpack_from(buffer, _EPOCH_OFFSET)[0])


def write_epoch(buffer: memoryview, epoch: int) -> None:
    """Begin a life; one aligned store."""
    buffer[_EPOCH_OFFSET : _EPOCH_OFFSET + WORD_BYTES] = _WORD.pack(epoch)


def write_division(buffer: memoryview, division: Division, layout: bytes) -> None:
    """Fix the layout; valid with its last store, the check word over all of it."""
    assert len(layout) == division.layout_bytes <= LAYOUT_BYTES_MAX
    buffer[LAYOUT_OFFSET : LAYOUT_OFFSET + len(layout)] = layout
    packed = _packed_division(division)
    end = _DIVISION_OFFSET + len(packed)
    buffer[_DIVISION_OFFSET:end] = packed
    buffer[end : end + WORD_BYTES] = _WORD.pack(check_word(packed + layout))


def read_division(buffer: memoryview) -> tuple[Division, bytes] | None:
    """The division and the encoded layout, or None when no layout was fixed."""
    end = _DIVISION_OFFSET + _DIVISION.size
    fingerprint, nbytes, slots, cells, data = _DIVISION.unpack_from(buffer, _DIVISION_OFFSET)
    if not 0 < nbytes <= LAYOUT_BYTES_MAX:
        return None
    layout = bytes(buffer[LAYOUT_OFFSET : LAYOUT_OFFSET + nbytes])
    packed = bytes(buffer[_DIVISION_OFFSET:end])
    if _WORD.unpack_from(buffer, end)[0] != check_word(packed + layout):
        return None
    division = Division(
        fingerprint=fingerprint,
        layout_bytes=nbytes,
        num_slots=slots,
        num_cells=cells,
        data_offset=data,
    )
    return division, layout


def _packed_division(division: Division) -> bytes:
    return _DIVISION.pack(
        division.fingerprint,
        division.layout_bytes,
        division.num_slots,
        division.num_cells,
        division.data_offset,
    )


def pack_entry(slot: int, entry: SlotEntry) -> bytes:
    """An entry of the slot table, its check word first."""
    flags = (_HAS_KEY if entry.key else 0) | (_HAS_PARENT if entry.parent else 0)
    unused = (0,) * (LAYER_GROUPS_MAX - len(entry.digests))
    body = _ENTRY.pack(
        entry.generation,
        entry.holder,
        entry.parts_open,
        entry.state,
        entry.group,
        flags,
        len(entry.digests),
        entry.key,
        entry.parent,
        *entry.digests,
        *unused,
    )
    return _WORD.pack(check_word(body, slot)) + body


def unpack_entry(slot: int, packed: bytes, group: int) -> SlotEntry:
    """The entry of a slot that lies in the region of `group`.

    One that is torn, damaged, or of another slot or group reads as SEALED: nobody finds it, and
    nobody gets its bytes before all who might copy there have been heard. Its generation is kept:
    that word is old or new, and a holder who has to name it knows which.
    """
    if packed == _FRESH_ENTRY:
        return SlotEntry(SlotState.FREE, 0, group, b"", b"", 0, 0, ())
    body = packed[WORD_BYTES:]
    generation, holder, parts, state, its_group, flags, count, key, parent, *digests = (
        _ENTRY.unpack(body)
    )
    fits = _WORD.unpack_from(packed)[0] == check_word(body, slot) and its_group == group
    if not fits or state not in tuple(SlotState) or count > LAYER_GROUPS_MAX:
        return SlotEntry(SlotState.SEALED, generation, group, b"", b"", 1, 0, ())
    return SlotEntry(
        SlotState(state),
        generation,
        group,
        key if flags & _HAS_KEY else b"",
        parent if flags & _HAS_PARENT else b"",
        parts,
        holder,
        tuple(digests[:count]),
    )


def pack_session(place: int, session: Session) -> bytes:
    """An attachment, its check word first; the client's name is cut to fit."""
    name = session.client.encode()[:CLIENT_BYTES_MAX]
    body = _SESSION.pack(session.id, session.pid, session.start_time, session.pid_namespace, name)
    return _WORD.pack(check_word(body, place)) + body


def unpack_session(place: int, packed: bytes) -> Session | None:
    """The session of a place of the table, or None.

    A torn one is none: its attach had not returned, or its end had come.
    """
    body = packed[WORD_BYTES : WORD_BYTES + _SESSION.size]
    if _WORD.unpack_from(packed)[0] != check_word(body, place):
        return None
    number, pid, start_time, namespace, name = _SESSION.unpack(body)
    return Session(
        id=number,
        pid=pid,
        start_time=start_time,
        pid_namespace=namespace,
        client=name.rstrip(b"\0").decode(errors="ignore"),
    )


def read_sessions(buffer: memoryview) -> list[Session]:
    """All sessions of the attachment table."""
    found = (read_session(buffer, place) for place in range(SESSIONS_MAX))
    return [session for session in found if session is not None]


def read_session(buffer: memoryview, place: int) -> Session | None:
    """The session of a place of the attachment table, or None."""
    at = SESSIONS_OFFSET + place * SESSION_BYTES
    return unpack_session(place, bytes(buffer[at : at + SESSION_BYTES]))


def write_session(buffer: memoryview, place: int, session: Session | None) -> None:
    """Replace the session of a place of the attachment table, or erase it."""
    packed = pack_session(place, session) if session else b""
    at = SESSIONS_OFFSET + place * SESSION_BYTES
    buffer[at : at + SESSION_BYTES] = packed.ljust(SESSION_BYTES, b"\0")
