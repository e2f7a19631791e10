"""Digests of pages from the device's own blocks: what a store commits, without reading the record.

The sums of `rayhicache.memory.digest` count fragments only, so those of a page are the sums of
its blocks, each at its fragment's place in the layer group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rayhicache.device.protocols import Event
from rayhicache.device.space import TransferSpace
from rayhicache.device.staging import StagedPlan, StagedTransfer
from rayhicache.errors import InvalidPlan
from rayhicache.memory.digest import WORD_BYTES, coefficients, fragment_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageSums:
    """Sums of a plan's pages, to which `rayhicache.memory.digest.placed` adds their place.

    Attributes:
        sums: per record group, `int64[pages, layer groups], host`, pages in the plan's order;
            there once `event` has passed.
        event: passes once they are there, and no block of the plan is read any more.
    """

    sums: Mapping[str, torch.Tensor]
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the fragment of one component of one layer lies in its layer group.

    Attributes:
        position: of its first byte.
        group: number of the layer group.
    """

    position: int
    group: int


def places_of(space: TransferSpace, pool: str) -> list[list[Place]]:
    """Places of a pool's fragments, of this rank's shard: by layer, then by component."""
    spec = space.layout.pool(pool)
    runs = space.layout.shape(spec.group).group_runs
    numbers = {layer_id: at for at, run in enumerate(runs) for layer_id in run.layer_ids}
    return [
        [
            Place(
                position=space.offset(pool, layer_id, part) - runs[numbers[layer_id]].offset,
                group=numbers[layer_id],
            )
            for part in range(len(spec.components))
        ]
        for layer_id in spec.layer_ids
    ]


def whole_pages(staged: StagedPlan) -> dict[str, int]:
    """How many pages of each record group a plan moves. Reads the plan's pinned indices.

    Raises:
        InvalidPlan: a page isn't there whole, or pools of one record group have other pages.
    """
    layout = staged.space.layout
    slots: dict[str, torch.Tensor] = {}
    for transfer in staged.transfers:
        if not transfer.count:
            continue
        blocks = layout.blocks_per_page(transfer.pool)
        host = transfer.pinned[: transfer.count]
        mine = torch.div(host[::blocks], blocks, rounding_mode="floor")
        whole = mine[:, None] * blocks + torch.arange(blocks)
        known = slots.setdefault(layout.pool(transfer.pool).group, mine)
        if not torch.equal(whole.flatten(), host) or not torch.equal(known, mine):
            raise InvalidPlan(
                asked=f"digest the pages of {transfer.count} blocks of pool {transfer.pool!r}",
                found="not the blocks of whole pages, the same for all pools and each in order",
                remedy="digest plans of whole pages, as stores move them",
            )
    return {group: mine.numel() for group, mine in slots.items()}


def new_sums(space: TransferSpace, group: str, pages: int, device: torch.device) -> torch.Tensor:
    """`int64[pages, layer groups], device`: nothing added yet."""
    runs = space.layout.shape(group).group_runs
    return torch.zeros((pages, len(runs)), dtype=torch.int64, device=device)


def add_with_torch(
    space: TransferSpace, transfer: StagedTransfer, rows: torch.Tensor, sums: torch.Tensor
) -> None:
    """Add what one pool's blocks have to the sums of its record group, with torch's operations.

    Args:
        rows: `int64[count], device`: the transfer's device indices.
        sums: as `new_sums`, where the blocks are.
    """
    spec = space.layout.pool(transfer.pool)
    runs = space.layout.shape(spec.group).group_runs
    words = max(run.nbytes for run in runs) // WORD_BYTES
    factors = coefficients(words).to(sums.device)
    for layer_id, places in zip(spec.layer_ids, places_of(space, spec.name), strict=True):
        for part, place in enumerate(places):
            if spec.components[part].block_bytes:
                blocks = space.device_rows(spec.name, layer_id, part)[rows]
                pages = blocks.view(sums.shape[0], -1)
                sums[:, place.group] += fragment_sums(pages, place.position, factors)
