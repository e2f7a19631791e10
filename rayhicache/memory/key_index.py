"""A hash index from page keys to slots, in shared memory: other processes read it without a call.

Open addressing with linear probing over cells of two words, at most half full:

    | prefix of the key (64 bits) | slot + 1 (32 bits), generation (32 bits) |     0: empty

A removal shifts the cells behind it back, so no tombstones pile up. One process writes. What a
reader sees in the middle of a shift may be wrong either way: the index is a hint, and the
owner's lease is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayhicache.core.slots import SlotRef

_MASK = 0xFFFFFFFF
_GROUP_FACTOR = 0x9E3779B97F4A7C15


def key_prefix(key: bytes, group: int) -> int:
    """64 bits of a page key, told apart by record group: groups share page keys."""
    return int.from_bytes(key[:8], "little") ^ (group * _GROUP_FACTOR & 0xFFFFFFFFFFFFFFFF)


class KeyIndex:
    """The index over some memory. Writers: one. Readers: any, in any process. Never blocks.

    Args:
        words: uint64[2 * num_cells], native order, writable for the writer.
    """

    def __init__(self, words: memoryview) -> None:
        assert words.itemsize == 8
        assert len(words) % 2 == 0
        self._words = words
        self._cells = len(words) // 2

    def insert(self, prefix: int, ref: SlotRef) -> None:
        """Add a record that is READY; its slot is in the index at most once."""
        cell = prefix % self._cells
        while self._words[2 * cell + 1]:
            cell = (cell + 1) % self._cells
        # The value comes last: a cell without one is empty.
        self._words[2 * cell] = prefix
        self._words[2 * cell + 1] = _value(ref)

    def remove(self, prefix: int, slot: int) -> None:
        """Take out the record of a slot; it must be there."""
        words, cells = self._words, self._cells
        hole = prefix % cells
        while words[2 * hole] != prefix or words[2 * hole + 1] >> 32 != slot + 1:
            assert words[2 * hole + 1], "only what was inserted is removed"
            hole = (hole + 1) % cells
        cell = (hole + 1) % cells
        while words[2 * cell + 1]:
            home = words[2 * cell] % cells
            # A cell may move into the hole unless its search starts behind the hole.
            if (cell - home) % cells >= (cell - hole) % cells:
                words[2 * hole] = words[2 * cell]
                words[2 * hole + 1] = words[2 * cell + 1]
                hole = cell
            cell = (cell + 1) % cells
        words[2 * hole + 1] = 0

    def find(self, prefix: int) -> SlotRef | None:
        """The slot that had this key when it was looked at, its generation modulo 2**32."""
        words, cells = self._words, self._cells
        cell = prefix % cells
        for _ in range(cells):
            value = words[2 * cell + 1]
            if not value:
                return None
            if words[2 * cell] == prefix:
                return SlotRef((value >> 32) - 1, value & _MASK)
            cell = (cell + 1) % cells
        return None

    def count_present(self, keys: Sequence[bytes], group: int) -> int:
        """How many leading keys are there."""
        for at, key in enumerate(keys):
            if self.find(key_prefix(key, group)) is None:
                return at
        return len(keys)

    def clear(self) -> None:
        """Empty the index."""
        self._words[:] = memoryview(bytes(16 * self._cells)).cast("Q")

    def close(self) -> None:
        """Give the memory back; the index can't be used after."""
        self._words.release()


def _value(ref: SlotRef) -> int:
    return (ref.slot + 1) << 32 | (ref.generation & _MASK)
