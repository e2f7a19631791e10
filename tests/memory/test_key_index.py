"""The key index against a dict, with keys that collide all the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayhicache.core.slots import SlotRef
from rayhicache.memory.format import num_cells
from rayhicache.memory.key_index import KeyIndex, key_prefix

SLOTS = 6


def empty_index(num_slots: int) -> KeyIndex:
    return KeyIndex(memoryview(bytearray(16 * num_cells(num_slots))).cast("Q"))


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 40)), max_size=60))
def test_every_record_is_found_until_it_is_removed(steps: list[tuple[int, int]]) -> None:
    """A step takes the slot's record out if it has one, and puts one in otherwise."""
    index = empty_index(SLOTS)
    held: dict[int, int] = {}
    for generation, (slot, prefix) in enumerate(steps, start=1):
        if slot in held:
            index.remove(held.pop(slot), slot)
        elif prefix not in held.values():
            held[slot] = prefix
            index.insert(prefix, SlotRef(slot, generation))
        for absent in set(range(41)) - set(held.values()):
            assert index.find(absent) is None
        for where, present in held.items():
            found = index.find(present)
            assert found is not None
            assert found.slot == where


def test_two_slots_with_one_key_are_told_apart_at_removal() -> None:
    index = empty_index(SLOTS)
    index.insert(5, SlotRef(1, 1))
    index.insert(5, SlotRef(2, 1))
    index.remove(5, 1)
    assert index.find(5) == SlotRef(2, 1)


def test_leading_keys_are_counted_per_group() -> None:
    index = empty_index(SLOTS)
    pages = [bytes([number]) * 16 for number in range(4)]
    for number in (0, 1, 3):
        index.insert(key_prefix(pages[number], 0), SlotRef(number, 1))
    assert index.count_present(pages, 0) == 2
    assert index.count_present(pages, 1) == 0
    assert index.count_present(pages[:2], 0) == 2
    index.clear()
    assert index.count_present(pages, 0) == 0
