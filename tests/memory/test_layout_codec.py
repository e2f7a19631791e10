"""Stored layouts, and attaching with any other one (R18, R27)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from arenas import hybrid_layout, open_owner
from rayhicache.core.layout import (
    ComponentSpec,
    GroupSpec,
    HitPolicy,
    PoolSpec,
    RecordLayout,
    Sharding,
)
from rayhicache.errors import InvalidLayout, LayoutMismatch
from rayhicache.memory.layout_codec import decode_layout, encode_layout, first_difference
from rayhicache.memory.process import this_process

LAYOUT = hybrid_layout()
POOL = LAYOUT.pools[0]
GROUP = LAYOUT.groups[1]
OTHER_PART = ComponentSpec(name="scales", block_bytes=64, dtype="uint8")


def pool_variants() -> Iterator[tuple[str, PoolSpec]]:
    part = POOL.components[0]
    yield "name", replace(POOL, name="latent")
    yield "layer_ids", replace(POOL, layer_ids=(0, 3))
    yield "components", replace(POOL, components=(part, OTHER_PART))
    yield "block_tokens", replace(POOL, block_tokens=2)
    yield "group", replace(POOL, group="state")
    yield "sharding", replace(POOL, sharding=Sharding.PER_RANK)
    for name, other in (
        ("name", replace(part, name="keys")),
        ("block_bytes", replace(part, block_bytes=4112)),
        ("dtype", replace(part, dtype="float8")),
    ):
        yield f"components[0].{name}", replace(POOL, components=(other,))


def variants() -> dict[str, RecordLayout]:
    """The layout with one field changed, by the name of the field."""
    found = {
        "page_tokens": replace(LAYOUT, page_tokens=8),
        "pools": replace(LAYOUT, pools=LAYOUT.pools[::-1]),
        "groups": replace(LAYOUT, groups=LAYOUT.groups[::-1]),
        "num_ranks": replace(LAYOUT, num_ranks=2),
        "num_stages": replace(LAYOUT, num_stages=2),
        "num_layer_groups": replace(LAYOUT, num_layer_groups=3),
    }
    for name, group in (
        ("policy", replace(GROUP, policy=HitPolicy.ALL_PAGES)),
        ("window_tokens", replace(GROUP, window_tokens=9)),
        ("arena_share", replace(GROUP, arena_share=0.25)),
    ):
        found[f"groups[1].{name}"] = replace(LAYOUT, groups=(LAYOUT.groups[0], group))
    renamed = replace(LAYOUT.pools[1], group="recurrent")
    found["groups[1].name"] = replace(
        LAYOUT,
        groups=(LAYOUT.groups[0], replace(GROUP, name="recurrent")),
        pools=(POOL, renamed),
    )
    for name, pool in pool_variants():
        groups = LAYOUT.groups if name != "group" else (GROUP,)
        found[f"pools[0].{name}"] = replace(LAYOUT, pools=(pool, LAYOUT.pools[1]), groups=groups)
    return found


VARIANTS = variants()


def test_every_field_of_a_layout_has_a_variant() -> None:
    expected = {field.name for field in fields(RecordLayout)}
    for kind, at in (
        (PoolSpec, "pools[0]"),
        (GroupSpec, "groups[1]"),
        (ComponentSpec, "pools[0].components[0]"),
    ):
        expected |= {f"{at}.{field.name}" for field in fields(kind)}
    assert expected == set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_field_survives_being_stored(name: str) -> None:
    assert decode_layout(encode_layout(VARIANTS[name])) == VARIANTS[name]
    assert first_difference(LAYOUT, VARIANTS[name]) is not None
    assert first_difference(VARIANTS[name], VARIANTS[name]) is None


@pytest.mark.parametrize("restarted", [False, True], ids=["same life", "adopted"])
def test_attach_with_any_one_field_changed_is_refused(root: Path, restarted: bool) -> None:
    owner = open_owner(root)
    owner.attach(LAYOUT, this_process("first"))
    if restarted:
        owner.close(unlink=False)
        owner = open_owner(root)
    for name, other in VARIANTS.items():
        with pytest.raises(LayoutMismatch) as refusal:
            owner.attach(other, this_process(name))
        assert "rayhicache down tier" in refusal.value.remedy
        # A renamed group shows in the first pool or group that says its name.
        assert name.split("[")[0] in refusal.value.found or name == "groups[1].name"
    owner.attach(LAYOUT, this_process("the same"))
    owner.close(unlink=True)


def test_the_differing_field_is_named_with_both_values() -> None:
    difference = first_difference(LAYOUT, VARIANTS["pools[0].components[0].dtype"])
    assert difference == "layout.pools[0].components[0].dtype is 'float8', the arena has 'uint8'"


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x91\x01", encode_layout(LAYOUT)[:-1]])
def test_bytes_that_are_no_layout_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidLayout):
        decode_layout(packed)
