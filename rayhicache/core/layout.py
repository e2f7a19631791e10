"""What one record looks like: which bytes of which pool lie where in a slot.

A record holds all the bytes of one page of one record group, in one contiguous slot:

    | layer 0                                | layer 1                                |
    | kv, shard 0 | kv, shard 1 | index      | kv, shard 0 | kv, shard 1 | index      |

Layer by layer, within a layer pool by pool, shard by shard; every fragment starts on 16 bytes.
So one layer of a page is one run, and a page without its index can't exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import lru_cache

from rayhicache.core.keys import joined
from rayhicache.errors import InvalidLayout, UnknownPool

ALIGNMENT = 16
RECORD_ALIGNMENT = 64
LAYER_GROUPS_MAX = 16
PARTS_MAX = 32


class HitPolicy(StrEnum):
    """Which records of a group a prefix needs."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    SNAPSHOT = "snapshot"


class Sharding(StrEnum):
    """Whether tensor-parallel ranks hold the same bytes of a pool or each its own."""

    REPLICATED = "replicated"
    PER_RANK = "per_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFormat:
    """Bytes of one entry of a sparse-attention index page: all keys first, then all scales.

    An index page of 64 entries of 128 + 4 bytes is 8,192 key bytes, then 256 scale bytes, so it
    moves whole and can't be sliced by token. `scale_bytes` is 0 where keys aren't quantised.
    """

    key_bytes: int
    scale_bytes: int

    def block_bytes(self, entries: int) -> int:
        """Bytes of one block of `entries` index entries."""
        return entries * (self.key_bytes + self.scale_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """One tensor of a pool: `block_bytes` per block and layer (0 is legal), as on the device."""

    name: str
    block_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The device memory of one kind of cached state.

    Attributes:
        name: as the engine calls it: "kv", "index", "draft".
        layer_ids: the model's global ids of the layers that have it, ascending; may be sparse.
        components: its tensors; bytes are opaque to the tier.
        block_tokens: tokens of one device block; a page is a whole number of blocks.
        group: the record group it lives and dies with.
        sharding: whether ranks hold the same bytes.
    """

    name: str
    layer_ids: tuple[int, ...]
    components: tuple[ComponentSpec, ...]
    block_tokens: int
    group: str = "full"
    sharding: Sharding = Sharding.REPLICATED

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, all components."""
        return sum(component.block_bytes for component in self.components)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Pools that live and die together.

    Attributes:
        name: of the group.
        policy: which of its records a prefix needs.
        window_tokens: of a sliding window, for TRAILING_PAGES.
        arena_share: its part of the arena, relative to the other groups'.
    """

    name: str = "full"
    policy: HitPolicy = HitPolicy.ALL_PAGES
    window_tokens: int = 0
    arena_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Where one component of one pool, layer and shard lies in a record; all blocks of a page."""

    layer_id: int
    pool: str
    component: int
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One contiguous run of a record that holds whole layers."""

    layer_ids: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordShape:
    """The record of one group.

    Attributes:
        nbytes: of a slot, a multiple of 64.
        fragments: in the order of the record.
        layer_runs: one per layer, in the order of the forward.
        group_runs: one per layer group: the units of digests and of pulls.
        num_parts: how many commits make a record READY (pipeline stages x writers).
    """

    nbytes: int
    fragments: tuple[Fragment, ...]
    layer_runs: tuple[LayerRun, ...]
    group_runs: tuple[LayerRun, ...]
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """The layout of a tier: fixed by the first worker's attach, equal for all later ones.

    Attributes:
        page_tokens: tokens a page.
        pools: all pools of the model, in the order in which they lie in a record.
        groups: the record groups that the pools name.
        num_ranks: tensor-parallel size; matters to pools that are sharded per rank.
        num_stages: pipeline stages; each commits its part of a record.
        num_layer_groups: into how many runs a record is divided for digests and pulls.
    """

    page_tokens: int
    pools: tuple[PoolSpec, ...]
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    num_ranks: int = 1
    num_stages: int = 1
    num_layer_groups: int = 4

    def __post_init__(self) -> None:
        check_layout(self)

    def pool(self, name: str) -> PoolSpec:
        """The pool of that name.

        Raises:
            UnknownPool: there is none.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise UnknownPool(
            asked=f"pool {name!r}",
            found=f"the layout has {[pool.name for pool in self.pools]}",
            remedy="name one of these",
        )

    def group(self, name: str) -> GroupSpec:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    def pools_of(self, group: str) -> tuple[PoolSpec, ...]:
        """The pools of one group, in record order."""
        return tuple(pool for pool in self.pools if pool.group == group)

    def blocks_per_page(self, pool: str) -> int:
        """Device blocks that make one page of the pool."""
        return self.page_tokens // self.pool(pool).block_tokens

    def shape(self, group: str = "full") -> RecordShape:
        """The record of one group."""
        return _shape(self, group)

    def fingerprint(self) -> str:
        """Hex digest of every field: equal fingerprints mean interchangeable bytes."""
        return hashlib.blake2b(_encoded(self), digest_size=16).hexdigest()

    def token_bytes(self) -> float:
        """Bytes of host memory that one token takes, over all groups that keep every page."""
        whole = [g.name for g in self.groups if g.policy is HitPolicy.ALL_PAGES]
        return sum(self.shape(name).nbytes for name in whole) / self.page_tokens


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


@lru_cache(maxsize=64)
def _shape(layout: RecordLayout, group: str) -> RecordShape:
    pools = layout.pools_of(group)
    layer_ids = sorted({layer_id for pool in pools for layer_id in pool.layer_ids})
    fragments: list[Fragment] = []
    runs: list[LayerRun] = []
    offset = 0
    for layer_id in layer_ids:
        start = offset
        for pool in pools:
            if layer_id not in pool.layer_ids:
                continue
            blocks = layout.page_tokens // pool.block_tokens
            shards = layout.num_ranks if pool.sharding is Sharding.PER_RANK else 1
            for shard in range(shards):
                for number, component in enumerate(pool.components):
                    nbytes = blocks * component.block_bytes
                    fragments.append(
                        Fragment(
                            layer_id=layer_id,
                            pool=pool.name,
                            component=number,
                            shard=shard,
                            offset=offset,
                            nbytes=nbytes,
                        )
                    )
                    offset = _aligned(offset + nbytes, ALIGNMENT)
        runs.append(LayerRun(layer_ids=(layer_id,), offset=start, nbytes=offset - start))
    sharded = any(pool.sharding is Sharding.PER_RANK for pool in pools)
    return RecordShape(
        nbytes=max(_aligned(offset, RECORD_ALIGNMENT), RECORD_ALIGNMENT),
        fragments=tuple(fragments),
        layer_runs=tuple(runs),
        group_runs=_merged(runs, layout.num_layer_groups),
        num_parts=layout.num_stages * (layout.num_ranks if sharded else 1),
    )


def _merged(runs: Sequence[LayerRun], count: int) -> tuple[LayerRun, ...]:
    """Divide the layers into `count` runs as even as can be, or one per layer if fewer."""
    count = min(count, len(runs))
    merged = []
    for number in range(count):
        some = runs[number * len(runs) // count : (number + 1) * len(runs) // count]
        merged.append(
            LayerRun(
                layer_ids=tuple(layer_id for run in some for layer_id in run.layer_ids),
                offset=some[0].offset,
                nbytes=sum(run.nbytes for run in some),
            )
        )
    return tuple(merged)


def _encoded(value: object) -> bytes:
    """A value as bytes, unambiguous: type tag and length before everything."""
    if isinstance(value, Enum):
        return joined(b"e", str(value.value).encode())
    if isinstance(value, (str, int, float)):
        return joined(type(value).__name__.encode(), repr(value).encode())
    if isinstance(value, tuple):
        return joined(b"t", *(_encoded(item) for item in value))
    assert is_dataclass(value), f"no encoding for {type(value).__name__}"
    return joined(b"d", *(_encoded(getattr(value, field.name)) for field in fields(value)))


def _refuse(found: str, remedy: str) -> None:
    raise InvalidLayout(asked="make a record layout", found=found, remedy=remedy)


def check_layout(layout: RecordLayout) -> None:
    """Refuse a layout that contradicts itself.

    Raises:
        InvalidLayout: with the pool, what is wrong and what would be right.
    """
    names = [pool.name for pool in layout.pools]
    groups = [group.name for group in layout.groups]
    if layout.page_tokens < 1 or layout.num_ranks < 1 or layout.num_stages < 1:
        _refuse("page_tokens, num_ranks and num_stages must be at least 1", "pass positive counts")
    if not 1 <= layout.num_layer_groups <= LAYER_GROUPS_MAX:
        _refuse(
            f"num_layer_groups is {layout.num_layer_groups}",
            f"choose 1 to {LAYER_GROUPS_MAX}",
        )
    if layout.num_stages * layout.num_ranks > PARTS_MAX:
        _refuse(
            f"{layout.num_stages} stages x {layout.num_ranks} ranks are too many parts",
            f"at most {PARTS_MAX} parts make a record",
        )
    if not names or len(set(names)) != len(names):
        _refuse(f"pool names {names}", "name at least one pool, each once")
    if len(set(groups)) != len(groups):
        _refuse(f"group names {groups}", "name each group once")
    for group in layout.groups:
        if not layout.pools_of(group.name):
            _refuse(f"group {group.name!r} has no pool", "leave it out or give it a pool")
        if group.policy is HitPolicy.TRAILING_PAGES and group.window_tokens < 1:
            _refuse(f"group {group.name!r} has no window", "pass window_tokens")
    for pool in layout.pools:
        _check_pool(layout, pool, groups)


def _check_pool(layout: RecordLayout, pool: PoolSpec, groups: Sequence[str]) -> None:
    if pool.group not in groups:
        _refuse(f"pool {pool.name!r} is of group {pool.group!r}", f"use one of {groups}")
    if not pool.layer_ids or list(pool.layer_ids) != sorted(set(pool.layer_ids)):
        _refuse(f"pool {pool.name!r} has layers {pool.layer_ids}", "list ids ascending, each once")
    if pool.block_tokens < 1 or layout.page_tokens % pool.block_tokens:
        _refuse(
            f"pool {pool.name!r} has blocks of {pool.block_tokens} tokens under pages of "
            f"{layout.page_tokens}",
            "make a page a whole number of blocks",
        )
    if not pool.components or any(part.block_bytes < 0 for part in pool.components):
        _refuse(f"pool {pool.name!r} has components {pool.components}", "name each tensor once")
