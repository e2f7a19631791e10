"""A record layout as msgpack, so that a restarted owner rebuilds its tier without a worker."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import msgpack

from rayhicache.core.layout import (
    ComponentSpec,
    GroupSpec,
    HitPolicy,
    PoolSpec,
    RecordLayout,
    Sharding,
)
from rayhicache.errors import InvalidLayout

_VERSION = 1


def encode_layout(layout: RecordLayout) -> bytes:
    """The layout as bytes; `decode_layout` gives an equal one back."""
    groups = [[g.name, g.policy.value, g.window_tokens, g.arena_share] for g in layout.groups]
    pools = [
        [
            pool.name,
            list(pool.layer_ids),
            [[part.name, part.block_bytes, part.dtype] for part in pool.components],
            pool.block_tokens,
            pool.group,
            pool.sharding.value,
        ]
        for pool in layout.pools
    ]
    counts = [layout.page_tokens, layout.num_ranks, layout.num_stages, layout.num_layer_groups]
    packed: bytes = msgpack.packb([_VERSION, counts, groups, pools])
    return packed


def decode_layout(packed: bytes) -> RecordLayout:
    """The layout that was encoded.

    Raises:
        InvalidLayout: the bytes are no layout of this version.
    """
    try:
        version, counts, groups, pools = msgpack.unpackb(packed)
        if version != _VERSION:
            raise ValueError(f"version {version}")
        page_tokens, num_ranks, num_stages, num_layer_groups = counts
        return RecordLayout(
            page_tokens=page_tokens,
            pools=tuple(_pool(*pool) for pool in pools),
            groups=tuple(_group(*group) for group in groups),
            num_ranks=num_ranks,
            num_stages=num_stages,
            num_layer_groups=num_layer_groups,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as fault:
        raise InvalidLayout(
            asked="read a stored layout",
            found=f"it can't be decoded: {fault}",
            remedy="it was written by another version of rayhicache",
        ) from fault


def _group(name: str, policy: str, window_tokens: int, arena_share: float) -> GroupSpec:
    return GroupSpec(
        name=name,
        policy=HitPolicy(policy),
        window_tokens=window_tokens,
        arena_share=arena_share,
    )


def _pool(
    name: str,
    layer_ids: list[int],
    components: list[tuple[str, int, str]],
    block_tokens: int,
    group: str,
    sharding: str,
) -> PoolSpec:
    return PoolSpec(
        name=name,
        layer_ids=tuple(layer_ids),
        components=tuple(
            ComponentSpec(name=part, block_bytes=nbytes, dtype=dtype)
            for part, nbytes, dtype in components
        ),
        block_tokens=block_tokens,
        group=group,
        sharding=Sharding(sharding),
    )


def first_difference(have: object, want: object, name: str = "layout") -> str | None:
    """The first field in which two layouts differ, with both values; None when they are equal."""
    if type(have) is not type(want):
        return f"{name} is {want!r}, the arena has {have!r}"
    if isinstance(have, tuple) and isinstance(want, tuple) and len(have) == len(want):
        pairs = [(f"{name}[{at}]", *pair) for at, pair in enumerate(zip(have, want, strict=True))]
    elif is_dataclass(have) and not isinstance(have, type):
        pairs = [
            (f"{name}.{field.name}", getattr(have, field.name), getattr(want, field.name))
            for field in fields(have)
        ]
    else:
        return None if have == want else f"{name} is {want!r}, the arena has {have!r}"
    found = (first_difference(a, b, where) for where, a, b in pairs)
    return next((difference for difference in found if difference), None)
