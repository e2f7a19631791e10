"""What can be restored is a set of lengths, agreed on by all groups."""

from __future__ import annotations

from collections.abc import Iterator

from rayhicache.core.hits import MISS, needed_pages, pages_to_lease, restorable_lengths
from rayhicache.core.layout import GroupSpec, HitPolicy, RecordLayout
from tiers import hybrid_layout, plain_layout, pool

FULL, WINDOW, STATE = hybrid_layout().groups


def lengths(num_pages: int, **present: set[int]) -> list[int]:
    there = {
        name: [page in present.get(name, set(range(num_pages))) for page in range(num_pages)]
        for name in ("full", "window", "state")
    }
    return list(restorable_lengths(hybrid_layout(), num_pages, there))


def test_a_full_group_restores_every_length_up_to_its_first_gap() -> None:
    assert lengths(4, full={0, 1, 3}) == [1, 2]
    assert lengths(4, full={1, 2, 3}) == []
    assert lengths(4) == [1, 2, 3, 4]


def test_a_window_needs_only_the_pages_that_the_next_token_can_see() -> None:
    assert needed_pages(WINDOW, 64, 5) == range(3, 5)
    assert needed_pages(WINDOW, 64, 1) == range(1)
    assert lengths(5, window={2, 3, 4}) == [4, 5]
    assert lengths(5, window={0, 1, 3, 4}) == [1, 2, 5]


def test_a_window_of_w_tokens_reaches_back_over_w_minus_1() -> None:
    def pages(window: int) -> int:
        spec = GroupSpec(name="w", policy=HitPolicy.TRAILING_PAGES, window_tokens=window)
        return len(needed_pages(spec, 64, 100))

    assert [pages(w) for w in (1, 2, 65, 66, 128, 129, 130, 1024)] == [0, 1, 1, 2, 2, 2, 3, 16]


def test_a_state_restores_just_the_boundaries_that_were_snapshot() -> None:
    assert needed_pages(STATE, 64, 5) == range(4, 5)
    assert lengths(6, state={1, 4}) == [2, 5]


def test_five_is_restorable_while_four_is_not_when_groups_are_intersected() -> None:
    assert lengths(6, full={0, 1, 2, 3, 4}, window={0, 1, 2, 3, 4}, state={0, 4, 5}) == [1, 5]
    assert lengths(6, window={3, 4}, state={0, 4, 5}) == [5]
    assert lengths(6, window={2, 3}, state={4}) == []


def test_the_order_of_the_groups_does_not_matter() -> None:
    turned = RecordLayout(page_tokens=64, pools=hybrid_layout().pools, groups=(STATE, WINDOW, FULL))
    there = {"full": [True] * 4 + [False] * 2, "window": [True] * 6, "state": [False, True] * 3}
    for layout in (hybrid_layout(), turned):
        assert list(restorable_lengths(layout, 6, there)) == [2, 4]


def test_a_lookup_reads_presence_no_further_than_the_first_gap() -> None:
    def there() -> Iterator[bool]:
        yield True
        yield False
        raise AssertionError("read past the gap")

    assert list(restorable_lengths(plain_layout(), 3, {"full": there()})) == [1]


def test_a_lease_covers_what_any_of_the_lengths_needs() -> None:
    assert pages_to_lease(hybrid_layout(), [2, 5]) == {
        "full": [0, 1, 2, 3, 4],
        "window": [0, 1, 3, 4],
        "state": [1, 4],
    }


def test_an_empty_prompt_is_a_miss() -> None:
    assert lengths(0) == []
    assert MISS.best == 0
    assert pool("kv", 1).block_bytes == 1
