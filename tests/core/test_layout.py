"""A record holds every byte of a page, and each lies where the layout says."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from rayhicache.core.layout import (
    ALIGNMENT,
    GroupSpec,
    HitPolicy,
    IndexFormat,
    PoolSpec,
    RecordLayout,
    Sharding,
)
from rayhicache.errors import InvalidLayout, UnknownPool
from tiers import PAGE, hybrid_layout, pool

INDEX = IndexFormat(key_bytes=128, scale_bytes=4)
PACKED = 656
GLM52_INDEX = (0, 1, *range(2, 78, 4))


def layout_of(*pools: PoolSpec, **others: Any) -> RecordLayout:
    return RecordLayout(page_tokens=PAGE, pools=pools, **others)


def model(layers: int, index_layers: tuple[int, ...]) -> RecordLayout:
    """A sparse-attention model: packed fp8 latent rows, and index pages on some layers."""
    return layout_of(
        pool("kv", PAGE * PACKED, layers=range(layers)),
        pool("index", INDEX.block_bytes(PAGE), layers=index_layers),
    )


def assert_whole(layout: RecordLayout, group: str = "full") -> None:
    """Every byte of every pool has one place of its own, and runs cover them in order."""
    shape = layout.shape(group)
    end = 0
    for fragment in shape.fragments:
        assert fragment.offset % ALIGNMENT == 0
        assert end <= fragment.offset < end + ALIGNMENT
        end = fragment.offset + fragment.nbytes
    assert end <= shape.nbytes < end + 80
    for runs in (shape.layer_runs, shape.group_runs):
        at = 0
        for run in runs:
            assert run.offset == at
            at += run.nbytes
            inside = [f for f in shape.fragments if f.layer_id in run.layer_ids]
            for fragment in inside:
                assert run.offset <= fragment.offset
                assert fragment.offset + fragment.nbytes <= at
        covered = [layer for run in runs for layer in run.layer_ids]
        assert covered == sorted({f.layer_id for f in shape.fragments})
    assert [len(run.layer_ids) for run in shape.layer_runs] == [1] * len(shape.layer_runs)


@pytest.mark.parametrize(
    ("layers", "index_layers", "token_bytes"),
    [
        (61, tuple(range(61)), 48_068),
        (78, tuple(range(78)), 61_464),
        (78, GLM52_INDEX, 53_940),
    ],
    ids=["DeepSeek-V3.2", "GLM-5", "GLM-5.2"],
)
def test_whole_models_take_the_bytes_that_are_published(
    layers: int, index_layers: tuple[int, ...], token_bytes: int
) -> None:
    layout = model(layers, index_layers)
    assert_whole(layout)
    assert layout.shape().nbytes == PAGE * token_bytes
    assert layout.token_bytes() == token_bytes


def test_an_index_page_is_its_keys_then_its_scales_and_moves_whole() -> None:
    assert INDEX.block_bytes(64) == 8_448
    shape = model(2, (0, 1)).shape()
    assert [(f.pool, f.nbytes) for f in shape.fragments] == [("kv", 41_984), ("index", 8_448)] * 2


def test_index_keys_on_21_of_78_layers_lie_on_just_those() -> None:
    assert len(GLM52_INDEX) == 21
    assert GLM52_INDEX[-1] == 74
    shape = model(78, GLM52_INDEX).shape()
    assert tuple(f.layer_id for f in shape.fragments if f.pool == "index") == GLM52_INDEX
    assert {run.nbytes for run in shape.layer_runs} == {41_984, 41_984 + 8_448}


def test_bf16_latents_and_heads_take_the_bytes_of_the_field() -> None:
    latent = layout_of(pool("kv", PAGE * 1152))
    heads = layout_of(pool("kv", PAGE * 2048, PAGE * 2048, layers=range(32)))
    assert latent.shape().fragments[0].nbytes == 73_728
    assert heads.token_bytes() == 131_072


def test_sparse_layers_of_several_pools_are_merged_in_the_order_of_the_forward() -> None:
    layout = layout_of(pool("kv", 32, layers=(3, 7, 11)), pool("side", 16, layers=(0, 2, 11)))
    assert_whole(layout)
    shape = layout.shape()
    assert [run.layer_ids for run in shape.layer_runs] == [(0,), (2,), (3,), (7,), (11,)]
    assert [f.pool for f in shape.fragments if f.layer_id == 11] == ["kv", "side"]


def test_fragments_start_on_16_bytes_whatever_their_sizes() -> None:
    layout = layout_of(pool("kv", 33, 1), pool("index", 15))
    assert_whole(layout)
    assert [f.offset for f in layout.shape().fragments][:3] == [0, 48, 64]


def test_a_component_of_no_bytes_has_a_place_and_takes_none() -> None:
    layout = layout_of(pool("kv", 32, 0), pool("index", 16))
    assert_whole(layout)
    assert [(f.offset, f.nbytes) for f in layout.shape().fragments][:3] == [
        (0, 32),
        (32, 0),
        (32, 16),
    ]


def test_a_layout_of_nothing_but_empty_components_still_has_a_slot() -> None:
    assert layout_of(pool("kv", 0)).shape().nbytes == 64


def test_a_pool_pooled_by_16_has_one_block_for_16_blocks_of_another() -> None:
    layout = RecordLayout(
        page_tokens=64 * 16,
        pools=(
            pool("kv", 64 * PACKED, block_tokens=64),
            pool("index", INDEX.block_bytes(64), block_tokens=64 * 16),
        ),
    )
    assert_whole(layout)
    assert (layout.blocks_per_page("kv"), layout.blocks_per_page("index")) == (16, 1)
    first = layout.shape().fragments[:2]
    assert [f.nbytes for f in first] == [16 * 64 * PACKED, 8_448]
    assert first[1].nbytes / layout.page_tokens == 8.25


def test_ranks_that_hold_different_bytes_have_a_shard_each_and_a_part_each() -> None:
    sharded = pool("kv", 32, sharding=Sharding.PER_RANK)
    layout = layout_of(sharded, pool("index", 16), num_ranks=4, num_stages=2)
    assert_whole(layout)
    shape = layout.shape()
    layer = [(f.pool, f.shard) for f in shape.fragments if f.layer_id == 0]
    assert layer == [("kv", 0), ("kv", 1), ("kv", 2), ("kv", 3), ("index", 0)]
    assert shape.num_parts == 8


def test_replicated_pools_are_there_once_whatever_the_number_of_ranks() -> None:
    one, eight = (layout_of(pool("kv", 32), num_ranks=ranks) for ranks in (1, 8))
    assert one.shape() == eight.shape()
    assert eight.shape().num_parts == 1


@pytest.mark.parametrize("count", [1, 3, 4, 16])
def test_layer_groups_divide_the_layers_evenly(count: int) -> None:
    layout = layout_of(pool("kv", 32, layers=range(7)), num_layer_groups=count)
    assert_whole(layout)
    sizes = [len(run.layer_ids) for run in layout.shape().group_runs]
    assert len(sizes) == min(count, 7)
    assert max(sizes) - min(sizes) <= 1


def test_each_group_has_records_of_its_own_pools_only() -> None:
    layout = hybrid_layout()
    for group, name in (("full", "kv"), ("window", "local"), ("state", "state")):
        assert_whole(layout, group)
        assert {f.pool for f in layout.shape(group).fragments} == {name}
    assert layout.token_bytes() == 1.0


CHANGES: dict[str, Any] = {
    "page_tokens": 128,
    "pools": (pool("kv", 48),),
    "groups": (GroupSpec(arena_share=2.0),),
    "num_ranks": 2,
    "num_stages": 2,
    "num_layer_groups": 2,
}
POOL_CHANGES: dict[str, Any] = {
    "name": "kv2",
    "layer_ids": (0, 2),
    "components": pool("kv", 16, 16).components,
    "block_tokens": 32,
    "sharding": Sharding.PER_RANK,
}


@pytest.mark.parametrize("name", [field.name for field in fields(RecordLayout)])
def test_any_changed_field_of_the_layout_changes_the_fingerprint(name: str) -> None:
    """R27: a field without an entry above fails here."""
    layout = layout_of(pool("kv", 32))
    assert replace(layout, **{name: CHANGES[name]}).fingerprint() != layout.fingerprint()


@pytest.mark.parametrize("name", POOL_CHANGES)
def test_any_changed_field_of_a_pool_changes_the_fingerprint(name: str) -> None:
    """R27."""
    before = pool("kv", 32)
    after = replace(before, **{name: POOL_CHANGES[name]})
    assert layout_of(before).fingerprint() != layout_of(after).fingerprint()


def test_the_order_of_dtypes_changes_the_fingerprint_though_no_size_differs() -> None:
    def with_dtypes(*dtypes: str) -> RecordLayout:
        bare = pool("kv", 32, 32)
        parts = [replace(c, dtype=d) for c, d in zip(bare.components, dtypes, strict=True)]
        return layout_of(replace(bare, components=tuple(parts)))

    assert with_dtypes("a", "b").fingerprint() != with_dtypes("b", "a").fingerprint()
    assert with_dtypes("a", "bc").fingerprint() != with_dtypes("ab", "c").fingerprint()


def test_the_same_layout_made_twice_has_the_same_fingerprint() -> None:
    assert hybrid_layout().fingerprint() == hybrid_layout().fingerprint()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"page_tokens": 0}, "at least 1"),
        ({"num_layer_groups": 17}, "num_layer_groups"),
        ({"num_ranks": 8, "num_stages": 8}, "too many parts"),
        ({"pools": ()}, "pool names"),
        ({"pools": (pool("kv", 1), pool("kv", 1))}, "pool names"),
        ({"groups": (GroupSpec(), GroupSpec())}, "group names"),
        ({"groups": (GroupSpec(), GroupSpec(name="w"))}, "'w' has no pool"),
        ({"groups": (GroupSpec(policy=HitPolicy.TRAILING_PAGES),)}, "no window"),
        ({"pools": (pool("kv", 1), pool("x", 1, group="other"))}, "group 'other'"),
        ({"pools": (pool("kv", 1, layers=(2, 1)),)}, "layers"),
        ({"pools": (pool("kv", 1, layers=()),)}, "layers"),
        ({"pools": (pool("kv", 1, block_tokens=48),)}, "blocks of 48"),
        ({"pools": (pool("kv"),)}, "components"),
        ({"pools": (pool("kv", -1),)}, "components"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidLayout, match=said):
        replace(layout_of(pool("kv", 32)), **change)


def test_an_unknown_pool_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UnknownPool, match=r"'draft'.*'kv'"):
        layout_of(pool("kv", 32)).pool("draft")
