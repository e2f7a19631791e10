"""A plan names every block that moves, or it is refused before anything is enqueued."""

from __future__ import annotations

import copy

import pytest

from rayhicache.core.layout import RecordLayout
from rayhicache.core.plan import (
    Limits,
    PoolTransfer,
    TransferPlan,
    check_plan,
    merge_plans,
    plan_pages,
    transfers_of,
)
from rayhicache.errors import InvalidPlan
from tiers import pool

LAYOUT = RecordLayout(page_tokens=64, pools=(pool("kv", 32), pool("index", 16)))
LIMITS = {
    "kv": Limits(first_host=10, host=20, device=8),
    "index": Limits(first_host=10, host=20, device=4),
}
Side = tuple[int, ...] | None


def plan(kv: tuple[Side, Side], index: tuple[Side, Side] | None = None) -> TransferPlan:
    """A plan of the kv pool's (host, device) sides, and of the index pool's if it is named."""
    others = None
    if index is not None:
        others = (PoolTransfer(pool="index", host_indices=index[0], device_indices=index[1]),)
    return TransferPlan(
        group="full", host_indices=kv[0], device_indices=kv[1], pool_transfers=others
    )


WHOLE = plan(((10, 11), (0, 1)), ((10, 11), (2, 3)))


def test_a_plan_without_pool_transfers_and_without_indices_moves_nothing() -> None:
    """R8."""
    assert transfers_of(plan((None, None)), LAYOUT) == ()
    check_plan(plan((None, None)), LAYOUT, LIMITS)


def test_a_pool_with_both_sides_none_does_nothing_where_nothing_moves() -> None:
    """R8."""
    assert transfers_of(plan((None, None), (None, None)), LAYOUT) == ()
    alone = RecordLayout(page_tokens=64, pools=(pool("kv", 32),))
    assert len(transfers_of(plan(((10,), (0,))), alone)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        plan(((10,), None), ((10,), (0,))),
        plan((None, (0,)), ((10,), (0,))),
        plan(((10,), (0,)), ((10,), None)),
        plan(((10,), (0,)), (None, (0,))),
    ],
)
def test_one_side_none_is_refused(wrong: TransferPlan) -> None:
    """R8."""
    with pytest.raises(InvalidPlan, match="only one side"):
        transfers_of(wrong, LAYOUT)


@pytest.mark.parametrize(
    ("wrong", "absent"),
    [
        (plan(((10,), (0,))), "index"),
        (plan(((10,), (0,)), (None, None)), "index"),
        (plan((None, None), ((10,), (0,))), "kv"),
    ],
)
def test_a_required_pool_that_is_absent_is_named(wrong: TransferPlan, absent: str) -> None:
    """R8."""
    with pytest.raises(InvalidPlan, match=f"'{absent}'.*left behind"):
        transfers_of(wrong, LAYOUT)


@pytest.mark.parametrize("name", ["kv", "draft"])
def test_a_pool_named_twice_or_unknown_is_refused(name: str) -> None:
    extra = PoolTransfer(pool=name, host_indices=(10,), device_indices=(0,))
    wrong = TransferPlan(
        group="full", host_indices=(10,), device_indices=(0,), pool_transfers=(extra,)
    )
    with pytest.raises(InvalidPlan, match=name):
        transfers_of(wrong, LAYOUT)


def test_an_unknown_group_is_refused() -> None:
    wrong = TransferPlan(group="window", host_indices=(10,), device_indices=(0,))
    with pytest.raises(InvalidPlan, match="window"):
        transfers_of(wrong, LAYOUT)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (plan(((10, 20), (0, 1)), ((10,), (0,))), r"'kv' has host index 20 outside \[10, 20\)"),
        (plan(((9,), (0,)), ((10,), (0,))), r"'kv' has host index 9 outside \[10, 20\)"),
        (plan(((10,), (8,)), ((10,), (0,))), r"'kv' has device index 8 outside \[0, 8\)"),
        (plan(((10,), (-1,)), ((10,), (0,))), r"'kv' has device index -1 outside \[0, 8\)"),
        (plan(((10,), (0,)), ((10,), (4,))), r"'index' has device index 4 outside \[0, 4\)"),
        (plan(((10,), (0,)), ((20,), (0,))), r"'index' has host index 20 outside \[10, 20\)"),
    ],
)
def test_an_index_out_of_range_is_named_with_its_pool_and_limit(
    wrong: TransferPlan, said: str
) -> None:
    """R13."""
    with pytest.raises(InvalidPlan, match=said):
        check_plan(wrong, LAYOUT, LIMITS)


def test_uneven_sides_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="'index' has 2 host and 1 device"):
        check_plan(plan(((10,), (0,)), ((10, 11), (0,))), LAYOUT, LIMITS)


def test_a_plan_is_the_same_before_and_after() -> None:
    """R8: whatever is asked of it."""
    before = copy.deepcopy(WHOLE)
    check_plan(WHOLE, LAYOUT, LIMITS)
    merge_plans([WHOLE, WHOLE], LAYOUT)
    with pytest.raises(InvalidPlan):
        check_plan(WHOLE, LAYOUT, {name: Limits(first_host=0, host=0, device=0) for name in LIMITS})
    assert before == WHOLE


def test_plans_of_a_batch_become_one_transfer_a_pool_in_layout_order() -> None:
    """R38: so a walk with layers outermost moves layer 0 of all requests first."""
    other = TransferPlan(
        group="full",
        host_indices=(15,),
        device_indices=(5,),
        pool_transfers=(PoolTransfer(pool="index", host_indices=(15,), device_indices=(1,)),),
    )
    assert merge_plans([WHOLE, plan((None, None)), other], LAYOUT) == (
        PoolTransfer(pool="kv", host_indices=(10, 11, 15), device_indices=(0, 1, 5)),
        PoolTransfer(pool="index", host_indices=(10, 11, 15), device_indices=(2, 3, 1)),
    )


SMALL_BLOCKS = RecordLayout(
    page_tokens=64, pools=(pool("kv", 32, block_tokens=16), pool("index", 16, block_tokens=64))
)


def test_blocks_of_16_under_pages_of_64_with_a_hit_that_ends_inside_the_last_page() -> None:
    """R35."""
    made = plan_pages(
        SMALL_BLOCKS, "full", [7, 3], {"kv": [50, 51, 52, 53, 54, 55], "index": [8, 9]}
    )
    assert made.host_indices == (28, 29, 30, 31, 12, 13)
    assert made.device_indices == (50, 51, 52, 53, 54, 55)
    assert made.pool_transfers == (
        PoolTransfer(pool="index", host_indices=(7, 3), device_indices=(8, 9)),
    )


def test_blocks_that_the_engine_has_already_are_left_out() -> None:
    """R35."""
    small = RecordLayout(page_tokens=64, pools=(pool("kv", 32, block_tokens=16),))
    made = plan_pages(small, "full", [7, 3], {"kv": [52, 53, 54]}, skip_tokens=32)
    assert (made.host_indices, made.device_indices) == ((30, 31, 12), (52, 53, 54))


@pytest.mark.parametrize(
    "blocks", [{"kv": [1]}, {"kv": [1, 2, 3, 4, 5], "index": [1]}, {"kv": [1], "index": [1, 2]}]
)
def test_blocks_that_the_pages_do_not_have_are_refused(blocks: dict[str, list[int]]) -> None:
    with pytest.raises(InvalidPlan, match="device blocks"):
        plan_pages(SMALL_BLOCKS, "full", [7], blocks)
