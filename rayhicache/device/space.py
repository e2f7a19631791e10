"""Where the bytes of each pool lie, on the device and in the arena, for those who copy them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rayhicache.core.layout import PoolSpec, RecordLayout, Sharding
from rayhicache.core.plan import Limits
from rayhicache.core.slots import Region
from rayhicache.errors import InvalidLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """A pool's device memory as bytes; a pool hands it to the copier and to nobody else.

    Attributes:
        spec: of the pool.
        components: one `uint8[num_layers, num_blocks, block_bytes], device` each, with a
            constant stride between layers.
        num_blocks: blocks of the pool.
    """

    spec: PoolSpec
    components: tuple[torch.Tensor, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRegion:
    """One group's records as bytes: `uint8[num_slots * record_bytes], host`."""

    region: Region
    data: torch.Tensor


class TransferSpace:
    """Views of one layer of one pool on both sides, by the record layout.

    Raises:
        InvalidLayout: a pool of the layout has no device side, a pool has no place in the
            layout, or the sizes of the two sides differ.
    """

    def __init__(
        self,
        layout: RecordLayout,
        pools: Mapping[str, PoolMemory],
        regions: Mapping[str, HostRegion],
        *,
        rank: int = 0,
    ) -> None:
        self.layout = layout
        self.pools = dict(pools)
        self.regions = dict(regions)
        self.rank = rank
        names = {pool.name for pool in layout.pools}
        if names != set(pools):
            raise InvalidLayout(
                asked="bring the pools of the device and of the record together",
                found=f"the record has {sorted(names)}, the device has {sorted(pools)}",
                remedy="every pool needs both sides; a pool left out would be garbled",
            )
        self._offsets: dict[tuple[str, int, int], int] = {}
        for group in layout.groups:
            if group.name not in regions:
                raise InvalidLayout(
                    asked=f"place the records of group {group.name!r}",
                    found=f"the arena has regions for {sorted(regions)}",
                    remedy="attach with the layout that the arena was made for",
                )
            for fragment in layout.shape(group.name).fragments:
                spec = layout.pool(fragment.pool)
                mine = rank if spec.sharding is Sharding.PER_RANK else 0
                if fragment.shard == mine:
                    key = (fragment.pool, fragment.layer_id, fragment.component)
                    self._offsets[key] = fragment.offset
        for memory in pools.values():
            self._check_memory(memory)

    def limits(self) -> dict[str, Limits]:
        """Bounds of each pool's indices."""
        bounds = {}
        for pool in self.layout.pools:
            region = self.regions[pool.group].region
            blocks = self.layout.blocks_per_page(pool.name)
            bounds[pool.name] = Limits(
                first_host=region.first_slot * blocks,
                host=(region.first_slot + region.num_slots) * blocks,
                device=self.pools[pool.name].num_blocks,
            )
        return bounds

    def offset(self, pool: str, layer_id: int, component: int) -> int:
        """Where the fragment of a component, of this rank's shard, begins in a record."""
        return self._offsets[pool, layer_id, component]

    def host_rows(self, pool: str, layer_id: int, component: int) -> torch.Tensor:
        """`uint8[num_slots, blocks_per_page, block_bytes], host`: a view into the arena.

        Row [s, k] is block k of the page in slot `first_slot + s`.
        """
        spec = self.layout.pool(pool)
        host = self.regions[spec.group]
        nbytes = spec.components[component].block_bytes
        return host.data.as_strided(
            (host.region.num_slots, self.layout.blocks_per_page(pool), nbytes),
            (host.region.record_bytes, nbytes, 1),
            self._offsets[pool, layer_id, component],
        )

    def device_rows(self, pool: str, layer_id: int, component: int) -> torch.Tensor:
        """`uint8[num_blocks, block_bytes], device`: one layer of a component."""
        memory = self.pools[pool]
        return memory.components[component][memory.spec.layer_ids.index(layer_id)]

    def _check_memory(self, memory: PoolMemory) -> None:
        spec = memory.spec
        if spec != self.layout.pool(spec.name):
            raise InvalidLayout(
                asked=f"use pool {spec.name!r}",
                found="its device side differs from the record's",
                remedy="take the record's widths from the device tensors",
            )
        for part, tensor in zip(spec.components, memory.components, strict=True):
            shape = (len(spec.layer_ids), memory.num_blocks, part.block_bytes)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.uint8:
                raise InvalidLayout(
                    asked=f"use component {part.name!r} of pool {spec.name!r}",
                    found=f"a tensor {tuple(tensor.shape)} of {tensor.dtype}",
                    remedy=f"pass uint8{list(shape)}",
                )
