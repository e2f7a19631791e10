"""Words of the domain for tests: small layouts, keys by number, a tier with its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayhicache.core.keys import PageKey
from rayhicache.core.layout import (
    ComponentSpec,
    GroupSpec,
    HitPolicy,
    PoolSpec,
    RecordLayout,
    Sharding,
)
from rayhicache.core.slots import Region, Session, SlotEntry, SlotRef
from rayhicache.core.tier import Fill, Tier

PAGE = 64


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "big"))


def keys(*numbers: int) -> list[PageKey]:
    return [key(number) for number in numbers]


def session(number: int) -> Session:
    return Session(
        id=number, pid=1000 + number, start_time=number, pid_namespace=7, client=f"client {number}"
    )


def pool(
    name: str,
    *nbytes: int,
    layers: Sequence[int] = (0, 1),
    block_tokens: int = PAGE,
    group: str = "full",
    sharding: Sharding = Sharding.REPLICATED,
) -> PoolSpec:
    parts = [
        ComponentSpec(name=f"part {at}", block_bytes=size, dtype="uint8")
        for at, size in enumerate(nbytes)
    ]
    return PoolSpec(
        name=name,
        layer_ids=tuple(layers),
        components=tuple(parts),
        block_tokens=block_tokens,
        group=group,
        sharding=sharding,
    )


def plain_layout(*, num_stages: int = 1) -> RecordLayout:
    """KV and index pages of two layers; each stage fills its part of a record."""
    return RecordLayout(
        page_tokens=PAGE, pools=(pool("kv", 32), pool("index", 16)), num_stages=num_stages
    )


def hybrid_layout() -> RecordLayout:
    """A full group, a sliding window of two pages and a recurrent state."""
    return RecordLayout(
        page_tokens=PAGE,
        pools=(
            pool("kv", 32),
            pool("local", 32, group="window"),
            pool("state", 64, group="state"),
        ),
        groups=(
            GroupSpec(),
            GroupSpec(name="window", policy=HitPolicy.TRAILING_PAGES, window_tokens=128),
            GroupSpec(name="state", policy=HitPolicy.SNAPSHOT),
        ),
    )


def regions(layout: RecordLayout, num_slots: int) -> list[Region]:
    """A region of `num_slots` slots for each group."""
    made: list[Region] = []
    offset = 0
    for at, group in enumerate(layout.groups):
        nbytes = layout.shape(group.name).nbytes
        made.append(
            Region(
                group=group.name,
                first_slot=at * num_slots,
                num_slots=num_slots,
                record_bytes=nbytes,
                offset=offset,
            )
        )
        offset += num_slots * nbytes
    return made


@dataclass(slots=True)
class RecordedTable:
    """A slot table in memory; `puts` counts the writes."""

    entries: dict[int, SlotEntry] = field(default_factory=dict)
    puts: int = 0

    def put(self, slot: int, entry: SlotEntry) -> None:
        self.entries[slot] = entry
        self.puts += 1


def new_tier(
    layout: RecordLayout | None = None,
    *,
    num_slots: int = 4,
    sessions: Sequence[int] = (1, 2),
    table: RecordedTable | None = None,
) -> Tier:
    layout = layout or plain_layout()
    tier = Tier(layout, regions(layout, num_slots), table=table)
    for number in sessions:
        tier.open_session(session(number))
    return tier


def reserved(
    tier: Tier, *numbers: int, by: int = 1, parent: int = 0, group: str = "full"
) -> list[SlotRef]:
    """Reserve pages that must all be missing."""
    found = tier.reserve(keys(*numbers), by, parent=key(parent) if parent else None, group=group)
    assert found is not None
    assert [fill.key for fill in found.fills] == keys(*numbers)
    return refs_of(found.fills)


def refs_of(fills: Sequence[Fill]) -> list[SlotRef]:
    return [fill.ref for fill in fills]


def store(tier: Tier, *numbers: int, by: int = 1, parent: int = 0, group: str = "full") -> None:
    """Reserve and commit pages, as one chunk."""
    refs = reserved(tier, *numbers, by=by, parent=parent, group=group)
    for part in range(tier.layout.shape(group).num_parts):
        tier.commit(refs, by, part=part)


def ready(tier: Tier) -> set[PageKey]:
    return {key for _, key in tier.ready_keys()}
