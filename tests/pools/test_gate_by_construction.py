"""Every reader of every pool waits for its own pool's bytes (R1), and none can be forgotten."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import rayhicache.pools
from device.worlds import (
    BLOCK,
    SECONDS,
    Make,
    Pool,
    Reader,
    World,
    as_bytes,
    index,
    mha,
    mla,
    nsa,
    step_until,
)
from rayhicache.device.cpu import CpuDevice
from rayhicache.pools.attention import MHAPool, MLAPool
from rayhicache.pools.base import METADATA, READER, WRITER, CompositePool, DevicePool
from rayhicache.pools.index import IndexPool, NSAPool
from rayhicache.testing import poison
from rayhicache.testing.faults import HoldingDevice, ungated

BASES = {DevicePool, CompositePool}
MAKES: dict[type, Make] = {MHAPool: mha, MLAPool: mla, IndexPool: index, NSAPool: nsa}
SLOTS, SEQ_LEN = [4, 1], 2 * BLOCK + 5


def pool_classes() -> list[type]:
    """Every class of every module of `rayhicache.pools` that is a pool."""
    found: set[type] = set()
    for info in pkgutil.walk_packages(rayhicache.pools.__path__, "rayhicache.pools."):
        for _, each in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if issubclass(each, (DevicePool, CompositePool)):
                found.add(each)
    return sorted(found, key=lambda each: each.__qualname__)


def public_callables(kind: type) -> Iterator[tuple[str, Callable[..., object]]]:
    for name, member in inspect.getmembers(kind, callable):
        if not name.startswith("_"):
            yield name, member


def role(member: Callable[..., object]) -> str | None:
    return member.__dict__.get("pool_role")


READERS = [
    pytest.param(kind, name, id=f"{kind.__name__}.{name}")
    for kind in pool_classes()
    if kind not in BASES
    for name, member in public_callables(kind)
    if role(member) == READER
]


def arguments(reader: Callable[..., object], layer_id: int, blocks: list[int]) -> dict[str, Any]:
    """Arguments by their names; an argument that nobody has heard of fails the test."""
    known: dict[str, Any] = {
        "layer_id": layer_id,
        "component": 0,
        "seq_len": SEQ_LEN,
        "page_indices": torch.tensor(blocks[:3]),
        "seq_len_tensor": torch.tensor([SEQ_LEN]),
        "seq_len_sum": SEQ_LEN,
        "max_seq_len": SEQ_LEN,
    }
    names = [name for name in inspect.signature(reader).parameters if name != "self"]
    unknown = [name for name in names if name not in known]
    assert not unknown, f"say here what a reader's arguments {unknown} are"
    chosen = {name: known[name] for name in names}
    if "seq_len_tensor" in names:
        chosen["page_indices"] = chosen["page_indices"][None]
    return chosen


def read(world: World, name: str, layer_id: int, blocks: list[int]) -> list[torch.Tensor]:
    reader = getattr(world.pool, name)
    with world.pools.reading(blocks):
        return as_bytes(reader(**arguments(reader, layer_id, blocks)))


class Reference:
    """A twin whose blocks were written by hand: what a reader must return, and of which pools."""

    def __init__(self, kind: type, name: str) -> None:
        self.world = World(MAKES[kind])
        self.blocks = self.world.take(8)
        self.world.fill_blocks(self.blocks, SLOTS)
        self.pools: set[str] = set()
        parts = self.world.pool.parts()
        for part in parts:
            part.__dict__["layer"] = self._noting(part)
        ids = sorted({i for part in parts for i in part.spec.layer_ids})
        self.values = {}
        for layer_id in ids:
            self.pools.clear()
            read(self.world, name, ids[0], self.blocks)
            if all(layer_id in world_part.spec.layer_ids for world_part in self._mine(parts)):
                self.values[layer_id] = read(self.world, name, layer_id, self.blocks)
        assert self.values
        self.world.close()

    def _mine(self, parts: tuple[DevicePool, ...]) -> list[DevicePool]:
        return [part for part in parts if part.name in self.pools]

    def _noting(self, part: DevicePool) -> Callable[..., torch.Tensor]:
        def layer(layer_id: int, component: int = 0) -> torch.Tensor:
            self.pools.add(part.name)
            return DevicePool.layer(part, layer_id, component)

        return layer


def test_every_public_callable_of_every_pool_is_classified() -> None:
    strange = [
        f"{kind.__name__}.{name}"
        for kind in pool_classes()
        for name, member in public_callables(kind)
        if role(member) not in (READER, WRITER, METADATA)
    ]
    assert not strange, f"mark as @reader, @writer or @metadata: {strange}"


def test_an_unclassified_callable_would_be_seen() -> None:
    class Leaky(MLAPool):
        def raw_rows(self) -> None: ...

    assert [name for name, member in public_callables(Leaky) if role(member) is None] == [
        "raw_rows"
    ]


def test_every_pool_class_is_made_here() -> None:
    assert set(pool_classes()) - BASES == set(MAKES), "say in MAKES how a new pool is made"


def test_the_readers_that_engines_know_are_there() -> None:
    names = {name for name, member in public_callables(NSAPool) if role(member) == READER}
    assert names == {
        "get_kv_buffer",
        "get_key_buffer",
        "get_value_buffer",
        "get_index_k_with_scale_buffer",
        "get_index_k_continuous",
        "get_index_k_scale_continuous",
        "get_index_k_scale_buffer",
    }


@pytest.mark.parametrize("kind", MAKES)
def test_no_public_attribute_of_a_pool_is_or_holds_a_tensor(kind: type) -> None:
    world = World(MAKES[kind])
    pools: list[Pool] = [world.pool, *world.pool.parts()]
    for pool in pools:
        for name in dir(pool):
            value = getattr(pool, name)
            if name.startswith("_") or callable(value):
                continue
            assert not _tensors(value), name
    world.close()


def _tensors(value: object) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(_tensors(item) for item in value)
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize(("kind", "name"), READERS)
def test_a_reader_waits_for_each_layer_and_never_returns_poison(kind: type, name: str) -> None:
    """The copy stream is held before each layer."""
    want = Reference(kind, name)
    world = World(MAKES[kind])
    world.fill_records(SLOTS)
    blocks = world.take(8)
    assert blocks == want.blocks
    world.loads.pause()
    ticket = world.load(blocks, SLOTS)
    for layer_id, value in want.values.items():
        reader = Reader(world.device, partial(read, world, name, layer_id, blocks))
        assert reader.next() == "blocked", f"layer {layer_id} was read before it was there"
        for pool in want.pools:
            step_until(world.loads, partial(ticket.counter.landed, layer_id, pool))
        assert _equal(reader.value(), value)
    world.close()


@pytest.mark.parametrize("late", ["kv", "index"])
@pytest.mark.parametrize(("kind", "name"), READERS)
def test_a_reader_waits_for_its_own_pool_when_only_that_is_late(
    kind: type, name: str, late: str
) -> None:
    """Rows landed and index keys late, and the reverse; a reader of what landed goes on."""
    want = Reference(kind, name)
    device = HoldingDevice(CpuDevice(wait_seconds=SECONDS), {late})
    world = World(MAKES[kind], device=device)
    world.fill_records(SLOTS)
    blocks = world.take(8)
    ticket = world.load(blocks, SLOTS)
    for part in world.pool.parts():
        if part.name != late:
            for layer_id in part.spec.layer_ids:
                ticket.counter.wait_until(layer_id, part.name)
    layer_id = max(want.values)
    reader = Reader(device, lambda: read(world, name, layer_id, blocks))
    if late in want.pools:
        assert reader.next() == "blocked", f"it returned before {late!r} was there"
        device.release()
    assert _equal(reader.value(), want.values[layer_id])
    assert late in want.pools or ticket.result(0) is None
    world.close()


def test_with_its_gate_taken_away_a_reader_returns_poison() -> None:
    """So the tests above have something to see, and so has `--show-race`."""
    device = HoldingDevice(CpuDevice(wait_seconds=SECONDS), {"index"})
    world = World(nsa, device=device)
    world.fill_records(SLOTS)
    blocks = world.take(8)
    ticket = world.load(blocks, SLOTS)
    with ungated(world.pools, {"index"}):
        (early,) = read(world, "get_index_k_continuous", 0, blocks)
        assert poison.is_poison(early)
        (rows,) = read(world, "get_key_buffer", 0, blocks)
        assert not poison.is_poison(rows)
    reader = Reader(device, lambda: read(world, "get_index_k_continuous", 0, blocks))
    assert reader.next() == "blocked"
    assert ticket.result(0) is None
    device.release()
    assert not poison.is_poison(reader.value()[0])
    world.close()


def test_a_held_copy_is_covered_by_the_ticket_s_end() -> None:
    device = HoldingDevice(CpuDevice(wait_seconds=SECONDS), {"index"})
    world = World(nsa, device=device)
    blocks = world.take(8)
    ticket = world.load(blocks, SLOTS)
    assert device.held.wait_pending(4)
    for layer_id in range(4):
        ticket.counter.wait_until(layer_id, "kv")
    world.pools.free(blocks)
    assert world.pools.allocator.num_free() < world.pools.num_blocks
    assert ticket.result(0) is None
    device.release()
    assert ticket.result(SECONDS) is not None
    assert world.pools.allocator.num_free() == world.pools.num_blocks
    world.close()


def _equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))
