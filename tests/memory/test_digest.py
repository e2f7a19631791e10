"""Sums of records: the vectorised ones are those of the definition, byte by byte."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhicache.core.layout import ComponentSpec, PoolSpec, RecordLayout, Sharding
from rayhicache.memory.digest import coefficients, fragment_sums, run_sums

MASK = (1 << 64) - 1


def coefficient(word: int) -> int:
    """SplitMix64 of the position, in plain integers."""
    x = (word + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return (x ^ (x >> 31)) | 1


def naive_sum(data: bytes, position: int) -> int:
    """Of bytes that lie at a position of their layer group."""
    return (
        sum((byte << 8 * (at % 8)) * coefficient(at // 8) for at, byte in enumerate(data, position))
        & MASK
    )


@st.composite
def layouts(draw: st.DrawFn) -> RecordLayout:
    pools = []
    for number in range(draw(st.integers(1, 3))):
        layer_ids = draw(st.sets(st.integers(0, 6), min_size=1, max_size=4))
        widths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
        pools.append(
            PoolSpec(
                name=f"p{number}",
                layer_ids=tuple(sorted(layer_ids)),
                components=tuple(
                    ComponentSpec(name=f"c{at}", block_bytes=width, dtype="uint8")
                    for at, width in enumerate(widths)
                ),
                block_tokens=4 // draw(st.sampled_from([1, 2, 4])),
                sharding=draw(st.sampled_from(Sharding)),
            )
        )
    return RecordLayout(
        page_tokens=4,
        pools=tuple(pools),
        num_ranks=draw(st.integers(1, 2)),
        num_layer_groups=draw(st.integers(1, 4)),
    )


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 2**31))
def test_a_records_sums_are_those_of_its_fragments_byte_by_byte(
    layout: RecordLayout, seed: int
) -> None:
    shape = layout.shape()
    # What lies between fragments is as random as they are, and counts as nothing.
    records = torch.randint(
        0, 256, (2, shape.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    for group, run in enumerate(shape.group_runs):
        rows = records[:, run.offset : run.offset + run.nbytes]
        sums = run_sums(layout, "full", group, rows).tolist()
        mine = [f for f in shape.fragments if f.layer_id in run.layer_ids]
        for record, found in zip(records, sums, strict=True):
            wanted = sum(
                naive_sum(
                    bytes(record[f.offset : f.offset + f.nbytes].tolist()), f.offset - run.offset
                )
                for f in mine
            )
            assert found & MASK == wanted & MASK


@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=1, max_size=70), position=st.integers(0, 100))
def test_a_fragment_may_begin_at_any_byte_and_have_any_size(data: bytes, position: int) -> None:
    rows = torch.tensor([list(data)], dtype=torch.uint8).view(1, len(data))
    (found,) = fragment_sums(rows, position, coefficients(32)).tolist()
    assert found & MASK == naive_sum(data, position)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=2, max_size=70), cut=st.integers(1, 69))
def test_a_fragment_in_two_pieces_has_the_sum_of_the_whole(data: bytes, cut: int) -> None:
    cut = min(cut, len(data) - 1)
    rows = torch.tensor([list(data)], dtype=torch.uint8)
    factors = coefficients(16)
    whole = fragment_sums(rows, 3, factors)
    parts = fragment_sums(rows[:, :cut], 3, factors) + fragment_sums(
        rows[:, cut:], 3 + cut, factors
    )
    assert torch.equal(whole, parts)
