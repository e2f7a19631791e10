"""Least recently used first, a page never before those that follow it, and all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import given
from hypothesis import strategies as st

from rayhicache.core.eviction import EvictionPolicy, PrefixLru
from rayhicache.core.keys import PageKey
from tiers import key, keys


def chain(policy: EvictionPolicy, *numbers: int, parent: int = 0) -> None:
    for number in numbers:
        policy.add(key(number), key(parent) if parent else None)
        parent = number


def holding(*numbers: int) -> Callable[[PageKey], bool]:
    held = set(keys(*numbers))
    return held.__contains__


def test_a_suffix_goes_before_its_prefix() -> None:
    policy = PrefixLru()
    chain(policy, 1, 2, 3)
    assert policy.victims(3, holding()) == keys(3, 2, 1)


def test_the_least_recently_used_branch_goes_first_and_the_shared_prefix_last() -> None:
    policy = PrefixLru()
    chain(policy, 1, 2, 3)
    chain(policy, 12, 13, parent=1)
    policy.touch(keys(1, 2, 3))
    assert policy.victims(5, holding()) == keys(13, 12, 3, 2, 1)


def test_a_held_page_and_all_before_it_stay() -> None:
    policy = PrefixLru()
    chain(policy, 1, 2, 3)
    chain(policy, 9)
    assert policy.victims(4, holding(2)) == keys(3, 9)
    assert policy.victims(4, holding()) == keys(3, 2, 1, 9)


def test_choosing_victims_changes_nothing() -> None:
    policy = PrefixLru()
    chain(policy, 1, 2, 3)
    chain(policy, 7, 8)
    first = policy.victims(4, holding(8))
    assert policy.victims(4, holding(8)) == first
    assert policy.victims(5, holding()) == policy.victims(5, holding())
    assert policy.victims(0, holding()) == []


def test_fewer_victims_than_asked_means_that_there_are_no_more() -> None:
    policy = PrefixLru()
    chain(policy, 1, 2)
    assert policy.victims(3, holding()) == keys(2, 1)


def test_a_prefix_that_comes_back_is_again_before_its_suffix() -> None:
    policy = PrefixLru()
    chain(policy, 1, 2)
    policy.remove(key(1))
    assert policy.victims(1, holding()) == keys(2)
    chain(policy, 1)
    assert policy.victims(2, holding()) == keys(2, 1)


def test_unknown_keys_are_passed_over_by_a_touch() -> None:
    policy = PrefixLru()
    chain(policy, 1)
    policy.touch(keys(5, 1))
    assert policy.victims(2, holding()) == keys(1)


def test_memory_does_not_grow_with_use() -> None:
    policy = PrefixLru()
    chain(policy, 1, 2, 3)
    for _ in range(1000):
        policy.touch(keys(1, 2, 3))
    assert len(policy.heap) < 100


steps = st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(1, 9)))


def parent_of(number: int) -> int | None:
    return number // 2 or None


@given(steps, st.sets(st.integers(1, 9)), st.integers(0, 9))
def test_any_history_evicts_as_a_plain_search_for_the_oldest_leaf_would(
    history: list[tuple[str, int]], held: set[int], count: int
) -> None:
    policy, stamps = PrefixLru(), dict[int, int]()
    for now, (what, number) in enumerate(history):
        if what == "add" and number not in stamps:
            parent = parent_of(number)
            policy.add(key(number), key(parent) if parent else None)
            stamps[number] = now
        elif what == "touch" and number in stamps:
            policy.touch(keys(number))
            stamps[number] = now
        elif what == "remove" and number in stamps:
            policy.remove(key(number))
            del stamps[number]
    assert policy.victims(count, holding(*held)) == keys(*plain(stamps, held, count))


def plain(stamps: dict[int, int], held: Iterable[int], count: int) -> list[int]:
    left, chosen = dict(stamps), list[int]()
    while len(chosen) < count:
        parents = {parent_of(number) for number in left}
        leaves = [n for n in left if n not in parents and n not in held]
        if not leaves:
            break
        chosen.append(min(leaves, key=left.__getitem__))
        del left[chosen[-1]]
    return chosen
