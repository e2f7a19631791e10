"""Transfer plans: which blocks of which pools move between host and device.

Indices are host integers, so making a plan never waits for a device. Both sides count blocks of
the pool: device index d is block d of the pool's device memory, host index h is block
`h % blocks_per_page` of the record in slot `h // blocks_per_page`. With one block a page that
is the slot itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayhicache.core.layout import RecordLayout
from rayhicache.errors import InvalidPlan

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTransfer:
    """Blocks of one pool that move: `host_indices[i]` pairs with `device_indices[i]`.

    Both sides None means that this pool has nothing to move; one side None is an error.
    """

    pool: str
    host_indices: Indices | None
    device_indices: Indices | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """All that one request moves, of one record group.

    Attributes:
        group: the record group.
        host_indices, device_indices: of the group's main pool, its first in the layout.
        pool_transfers: the group's other pools, or None if it has none.
    """

    group: str
    host_indices: Indices | None
    device_indices: Indices | None
    pool_transfers: tuple[PoolTransfer, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Exclusive upper bounds of a pool's indices; `first_host` is the lowest host index."""

    first_host: int
    host: int
    device: int


def transfers_of(plan: TransferPlan, layout: RecordLayout) -> tuple[PoolTransfer, ...]:
    """Every pool transfer of a plan that moves something, the main pool's first.

    Raises:
        InvalidPlan: a required pool is absent, a pool is named twice or is not of the group, or
            one side of a transfer is None.
    """
    pools = [pool.name for pool in layout.pools_of(plan.group)]
    if not pools:
        raise _invalid(plan, f"the layout has no group {plan.group!r}", "name one of its groups")
    main = PoolTransfer(
        pool=pools[0], host_indices=plan.host_indices, device_indices=plan.device_indices
    )
    named = (main, *(plan.pool_transfers or ()))
    seen: set[str] = set()
    for transfer in named:
        if transfer.pool not in pools or transfer.pool in seen:
            raise _invalid(
                plan,
                f"pool {transfer.pool!r} is named twice or is not of the group",
                f"name each of {pools} once",
            )
        seen.add(transfer.pool)
        if (transfer.host_indices is None) != (transfer.device_indices is None):
            raise _invalid(
                plan,
                f"pool {transfer.pool!r} has only one side",
                "give both host and device indices, or neither",
            )
    moving = tuple(t for t in named if t.host_indices is not None)
    absent = [name for name in pools if name not in {t.pool for t in moving}]
    if moving and absent:
        raise _invalid(
            plan,
            f"{absent} would be left behind",
            "a record is whole: move every pool of its group",
        )
    return moving


def check_plan(plan: TransferPlan, layout: RecordLayout, limits: Mapping[str, Limits]) -> None:
    """Refuse a plan whose sides are uneven or out of range, before anything is enqueued.

    Args:
        limits: per pool of the group.

    Raises:
        InvalidPlan: with pool, index and limit.
    """
    # Pools that share a block table share the very tuples: each is looked through once.
    known: set[tuple[int, int, int]] = set()
    for transfer in transfers_of(plan, layout):
        host, device = transfer.host_indices, transfer.device_indices
        assert host is not None
        assert device is not None
        bound = limits[transfer.pool]
        if len(host) != len(device):
            raise _invalid(
                plan,
                f"pool {transfer.pool!r} has {len(host)} host and {len(device)} device indices",
                "pair them one to one",
            )
        sides = (
            ("host", host, bound.first_host, bound.host),
            ("device", device, 0, bound.device),
        )
        for side, indices, low, high in sides:
            if (id(indices), low, high) not in known:
                _check_range(plan, transfer.pool, side, indices, low, high)
                known.add((id(indices), low, high))


def _check_range(
    plan: TransferPlan, pool: str, side: str, indices: Indices, low: int, high: int
) -> None:
    if indices and not (low <= min(indices) and max(indices) < high):
        worst = next(index for index in indices if not low <= index < high)
        raise _invalid(
            plan,
            f"pool {pool!r} has {side} index {worst} outside [{low}, {high})",
            "plan with the pool's own limits",
        )


def _invalid(plan: TransferPlan, found: str, remedy: str) -> InvalidPlan:
    return InvalidPlan(asked=f"move blocks of group {plan.group!r}", found=found, remedy=remedy)


def merge_plans(plans: Sequence[TransferPlan], layout: RecordLayout) -> tuple[PoolTransfer, ...]:
    """One transfer per pool over all plans of a batch, in layout order.

    A backend that walks layers outermost then moves layer 0 of every request before layer 1 of
    any. The plans are left as they are.

    Raises:
        InvalidPlan: as `transfers_of`.
    """
    if len(plans) == 1:
        named = {transfer.pool: transfer for transfer in transfers_of(plans[0], layout)}
        return tuple(named[pool.name] for pool in layout.pools if pool.name in named)
    host: dict[str, list[int]] = {}
    device: dict[str, list[int]] = {}
    for plan in plans:
        for transfer in transfers_of(plan, layout):
            host.setdefault(transfer.pool, []).extend(transfer.host_indices or ())
            device.setdefault(transfer.pool, []).extend(transfer.device_indices or ())
    return tuple(
        PoolTransfer(
            pool=pool.name,
            host_indices=tuple(host[pool.name]),
            device_indices=tuple(device[pool.name]),
        )
        for pool in layout.pools
        if pool.name in host
    )


def plan_pages(
    layout: RecordLayout,
    group: str,
    slots: Sequence[int],
    blocks: Mapping[str, Sequence[int]],
    *,
    skip_tokens: int = 0,
) -> TransferPlan:
    """Plan the move of consecutive pages of a prompt between slots and device blocks.

    Args:
        slots: of the pages, in prefix order.
        blocks: per pool of the group, device blocks in prefix order. They may end inside the last
            page: a hit ends where the engine's blocks end.
        skip_tokens: leading tokens of the first page that the engine has already; whole blocks
            of each pool.

    Raises:
        InvalidPlan: more blocks than the pages have, or a pool without blocks.
    """
    transfers = []
    # Pools whose block is a page share the slots, and those of one block table their blocks.
    whole = tuple(slots)
    tables = {id(table): tuple(table) for table in blocks.values()}
    for pool in layout.pools_of(group):
        per_page = layout.page_tokens // pool.block_tokens
        skip_blocks = skip_tokens // pool.block_tokens
        have = len(slots) * per_page - skip_blocks
        device = tables[id(blocks[pool.name])] if pool.name in blocks else ()
        if pool.name not in blocks or len(device) > have:
            raise InvalidPlan(
                asked=f"plan {len(slots)} pages of group {group!r}",
                found=f"pool {pool.name!r} has {len(device)} device blocks for {have}",
                remedy=f"pass at most {per_page} blocks a page for each pool of the group",
            )
        if per_page == 1 and len(device) == len(whole):
            host = whole
        else:
            host = tuple(
                slots[(skip_blocks + at) // per_page] * per_page + (skip_blocks + at) % per_page
                for at in range(len(device))
            )
        transfers.append(PoolTransfer(pool=pool.name, host_indices=host, device_indices=device))
    main, *others = transfers
    return TransferPlan(
        group=group,
        host_indices=main.host_indices,
        device_indices=main.device_indices,
        pool_transfers=tuple(others) or None,
    )
