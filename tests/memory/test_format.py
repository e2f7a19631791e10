"""The tables of an arena: what was written is read back, and nothing else passes for it."""

from __future__ import annotations

import itertools

import pytest

from arenas import NOBODY, key, session_of
from rayhicache.core.slots import SlotEntry, SlotState
from rayhicache.memory import format as fmt

DIGESTS = (1, 2**64 - 1, 3)
READY = SlotEntry(SlotState.READY, 7, 0, key(1), key(0), 0, 0, DIGESTS)
ENTRIES = {
    "free": SlotEntry(SlotState.FREE, 7, 0, b"", b"", 0, 0, ()),
    "filling": SlotEntry(SlotState.FILLING, 8, 0, key(1), b"", 0b101, 1 << 33, ()),
    "ready": READY,
    "hidden": READY._replace(key=b""),
    "sealed": SlotEntry(SlotState.SEALED, 8, 0, key(1), key(0), 1, 5, ()),
    "other record": READY._replace(generation=9, key=key(2), digests=(4, 5, 6)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_read_back_as_it_was_written(name: str) -> None:
    packed = fmt.pack_entry(3, ENTRIES[name])
    assert len(packed) == fmt.ENTRY_BYTES
    assert fmt.unpack_entry(3, packed, 0) == ENTRIES[name]


def test_a_fresh_table_is_free() -> None:
    assert fmt.unpack_entry(0, bytes(fmt.ENTRY_BYTES), 2).state is SlotState.FREE


@pytest.mark.parametrize("at", range(fmt.ENTRY_BYTES))
def test_an_entry_with_any_flipped_bit_is_sealed(at: int) -> None:
    packed = bytearray(fmt.pack_entry(3, READY))
    packed[at] ^= 1 << at % 8
    assert fmt.unpack_entry(3, bytes(packed), 0).state is SlotState.SEALED


def test_an_entry_of_another_slot_or_group_is_sealed() -> None:
    packed = fmt.pack_entry(3, READY)
    assert fmt.unpack_entry(4, packed, 0).state is SlotState.SEALED
    assert fmt.unpack_entry(3, packed, 1).state is SlotState.SEALED


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(ENTRIES, 2)))
def test_a_cut_off_store_leaves_the_old_entry_the_new_one_or_a_sealed_one(
    old: str, new: str
) -> None:
    """Words are stored one by one, the check word last; the generation is never a third one."""
    before, after = (fmt.pack_entry(3, ENTRIES[name]) for name in (old, new))
    for stored in range(fmt.WORD_BYTES, fmt.ENTRY_BYTES, fmt.WORD_BYTES):
        torn = before[: fmt.WORD_BYTES] + after[fmt.WORD_BYTES : stored] + before[stored:]
        found = fmt.unpack_entry(3, torn, 0)
        assert found == ENTRIES[old] or found.state is SlotState.SEALED
        assert found.generation in (ENTRIES[old].generation, ENTRIES[new].generation)


def test_a_session_is_read_back_and_a_torn_one_is_none() -> None:
    session = session_of(NOBODY, 1 << 33)
    packed = fmt.pack_session(0, session)
    assert len(packed) <= fmt.SESSION_BYTES
    assert fmt.unpack_session(0, packed.ljust(fmt.SESSION_BYTES, b"\0")) == session
    assert fmt.unpack_session(1, packed.ljust(fmt.SESSION_BYTES, b"\0")) is None
    assert fmt.unpack_session(0, packed[:20].ljust(fmt.SESSION_BYTES, b"\0")) is None
    assert fmt.unpack_session(0, bytes(fmt.SESSION_BYTES)) is None


def test_a_long_client_name_is_cut_and_stays_text() -> None:
    identity = NOBODY.__class__(pid=1, start_time=2, pid_namespace=3, client="ü" * 100)
    packed = fmt.pack_session(0, session_of(identity, 1)).ljust(fmt.SESSION_BYTES, b"\0")
    found = fmt.unpack_session(0, packed)
    assert found is not None
    assert found.client == "ü" * (fmt.CLIENT_BYTES_MAX // 2)


def test_a_layout_counts_only_with_its_check_word() -> None:
    buffer = memoryview(bytearray(fmt.TABLE_OFFSET))
    assert fmt.read_division(buffer) is None
    division = fmt.Division(
        fingerprint=b"f" * 16, layout_bytes=5, num_slots=9, num_cells=19, data_offset=8192
    )
    fmt.write_division(buffer, division, b"hello")
    assert fmt.read_division(buffer) == (division, b"hello")
    buffer[fmt.LAYOUT_OFFSET] ^= 1
    assert fmt.read_division(buffer) is None
