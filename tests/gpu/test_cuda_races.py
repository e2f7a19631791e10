"""Races held open on a GPU by sleeping kernels; each test also shows what happens without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpu.gpus import BLOCKS, LAYERS, PAGE, SECONDS, SLEEP_CYCLES, SleepyDevice, World
from rayhicache.core.plan import TransferPlan
from rayhicache.device.copier import LoadRequest
from rayhicache.errors import InvalidPlan
from rayhicache.testing import poison
from rayhicache.testing.faults import ungated

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def world() -> Iterator[World]:
    world = World(SleepyDevice())
    yield world
    world.close()


def read_all(world: World, blocks: list[int]) -> dict[tuple[str, int], torch.Tensor]:
    """Read every pool and layer at once, as the forward does; the copies run on the stream."""
    found = {}
    with world.pools.reading(blocks):
        for layer_id in range(LAYERS):
            rows = world.pool.get_key_buffer(layer_id).view(BLOCKS, -1)
            found["kv", layer_id] = rows[blocks].view(torch.uint8)
            index = world.pool.get_index_k_with_scale_buffer(layer_id)
            found["index", layer_id] = index[blocks]
    return found


@pytest.mark.parametrize("sleepy", [{"kv", "index"}, {"index"}, {"kv"}])
def test_every_read_waits_for_its_own_layer(world: World, sleepy: set[str]) -> None:
    """R1, R3: with KV landed and the index late, and the reverse."""
    world.fill_records([1, 3])
    world.device.sleepy = frozenset(sleepy)
    blocks = world.take(2)
    world.load(blocks, [1, 3])
    for (pool, layer_id), rows in read_all(world, blocks).items():
        for row, slot in zip(rows.cpu(), [1, 3], strict=True):
            assert torch.equal(row, world.expected(pool, layer_id, slot))


@pytest.mark.parametrize("pool", ["kv", "index"])
def test_without_the_gate_a_late_pool_is_read_as_poison(world: World, pool: str) -> None:
    world.fill_records([1])
    world.device.sleepy = frozenset({pool})
    blocks = world.take(1)
    with ungated(world.pools, {pool}):
        ticket = world.load(blocks, [1])
        found = read_all(world, blocks)
    assert poison.is_poison(found[pool, LAYERS - 1].cpu())
    assert ticket.result(SECONDS)


def test_a_load_into_freed_blocks_waits_for_the_forward_that_wrote_them(world: World) -> None:
    """R10: the loaded content wins."""
    world.fill_records([2])
    blocks = world.take(1)
    torch.cuda._sleep(10 * SLEEP_CYCLES)
    poison.poison(world.memories)
    world.pools.free(blocks)
    assert world.take(1) == blocks
    world.load(blocks, [2])
    for (pool, layer_id), rows in read_all(world, blocks).items():
        assert torch.equal(rows[0].cpu(), world.expected(pool, layer_id, 2))


def test_a_store_waits_for_the_compute_and_its_blocks_for_the_store(world: World) -> None:
    """R11: the host has what was computed, though the block is reused right after."""
    blocks = world.take(1)
    torch.cuda._sleep(10 * SLEEP_CYCLES)
    for memory in world.memories.values():
        memory.components[0][:, blocks] = 7
    ticket = world.store(blocks, [4])
    world.pools.free(blocks)
    assert blocks[0] not in (world.take(BLOCKS - 1) or [])
    assert ticket.result(SECONDS)
    assert bool((world.space.host_rows("kv", 0, 0)[4] == 7).all())
    assert bool((world.space.host_rows("index", LAYERS - 1, 0)[4] == 7).all())


def test_indices_of_every_pool_survive_their_caller(world: World) -> None:
    """R7, R26: the stream sleeps, the plans die, and memory of their size is filled anew."""
    world.fill_records(range(6))
    world.device.sleepy = frozenset({"kv", "index"})
    blocks = world.take(6)
    for block, slot in zip(blocks, range(6), strict=True):
        world.load([block], [slot])
        junk = [torch.full((1,), 5, dtype=torch.int64, device="cuda") for _ in range(64)]
        del junk
    found = read_all(world, blocks)
    for (pool, layer_id), rows in found.items():
        for slot, row in enumerate(rows.cpu()):
            assert torch.equal(row, world.expected(pool, layer_id, slot))


def test_an_index_out_of_range_is_refused_before_anything_is_enqueued(world: World) -> None:
    """R13."""
    plan = TransferPlan(group="full", host_indices=(0,), device_indices=(BLOCKS,))
    with pytest.raises(InvalidPlan, match="left behind"):
        world.copier.start_loading([LoadRequest(id="a", plan=plan)])
    assert world.copier.num_open() == 0


def test_the_pageable_way_brings_the_same_bytes(world: World) -> None:
    """R21: memory that the driver refused to register is copied all the same."""
    world.device.unmap_host(world.host)
    world.fill_records([1])
    blocks = world.take(1)
    world.load(blocks, [1])
    for (pool, layer_id), rows in read_all(world, blocks).items():
        assert torch.equal(rows[0].cpu(), world.expected(pool, layer_id, 1))
    ticket = world.store(blocks, [2])
    assert ticket.result(SECONDS)
    assert torch.equal(world.space.host_rows("kv", 1, 0)[2], world.space.host_rows("kv", 1, 0)[1])
    assert world.pools.block_tokens == PAGE
