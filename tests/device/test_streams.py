"""Fences both ways: a load after the work that used its blocks, a store after what it reads."""

from __future__ import annotations

from functools import partial
from typing import Any

from device.worlds import SECONDS, World, all_enqueued, mla, nsa, step_until
from rayhicache.device.cpu_stream import CpuStream
from rayhicache.testing import poison


def compute_stream(world: World) -> CpuStream:
    """A compute stream of its own, as on a GPU, held."""
    stream = world.device.new_stream("compute")
    stream.pause()
    return stream


def test_a_load_waits_for_work_that_still_writes_its_freed_blocks() -> None:
    """R10: the loaded bytes win over a forward that was running when the blocks were freed."""
    world = World(nsa)
    world.fill_records([4])
    compute = compute_stream(world)
    blocks = world.take(4)
    with world.device.use(compute):
        compute.enqueue(lambda: poison.poison(world.memories, blocks), "forward")
        world.pools.free(blocks)
        again = world.take(4)
        assert sorted(again) == sorted(blocks)
        ticket = world.load(again, [4])
    all_enqueued(ticket)
    assert ticket.result(0.05) is None
    compute.resume()
    assert ticket.result(SECONDS)
    world.expect(again, [4])
    world.close()


def test_a_load_does_not_wait_for_work_on_other_blocks() -> None:
    world = World(nsa)
    world.fill_records([4])
    compute = compute_stream(world)
    blocks, others = world.take(4), world.take(4)
    with world.device.use(compute):
        compute.enqueue(lambda: None, "forward")
        world.pools.free(others)
        assert world.load(blocks, [4]).result(SECONDS)
    world.expect(blocks, [4])
    world.close()


def test_a_store_waits_for_the_compute_that_writes_its_blocks() -> None:
    """R11, first half."""
    world = World(nsa)
    compute = compute_stream(world)
    blocks = world.take(4)
    with world.device.use(compute):
        compute.enqueue(lambda: world.fill_blocks(blocks, [3]), "forward")
        ticket = world.store(blocks, [0])
    all_enqueued(ticket)
    assert ticket.result(0.05) is None
    compute.resume()
    assert ticket.result(SECONDS)
    poison.poison(world.memories)
    assert world.load(blocks, [0]).result(SECONDS)
    world.expect(blocks, [3])
    world.close()


def test_blocks_freed_under_a_store_are_not_given_out_before_it_has_read_them() -> None:
    """R11, second half."""
    world = World(nsa)
    blocks = world.take(24)
    world.fill_blocks(blocks[:4], [3])
    world.stores.pause()
    ticket = world.store(blocks[:4], [0])
    world.pools.free(blocks[:4])
    assert world.pools.allocate(1) is None
    world.stores.resume()
    assert ticket.result(SECONDS)
    reused = world.take(4)
    assert sorted(reused) == sorted(blocks[:4])
    poison.poison(world.memories)
    assert world.load(reused, [0]).result(SECONDS)
    world.expect(reused, [3])
    world.close()


def test_loads_and_stores_run_beside_each_other() -> None:
    world = World(nsa)
    mine, others = world.take(4), world.take(4)
    world.stores.pause()
    store = world.store(mine, [0])
    assert world.load(others, [4]).result(SECONDS)
    assert store.result(0) is None
    world.close()


def test_each_layer_of_sparse_ids_waits_for_its_own_landing() -> None:
    """R2: rows on layers 3, 7 and 11, a side pool on 0, 2 and 11."""
    world = World(
        lambda d, g: mla(d, g, layer_ids=[3, 7, 11]),
        lambda d, g: mla(d, g, name="side", layer_ids=[0, 2, 11]),
    )
    world.loads.pause()
    ticket = world.load(world.take(4), [4])
    all_enqueued(ticket)
    order = [(0, "side"), (2, "side"), (3, "kv"), (7, "kv"), (11, "kv"), (11, "side")]
    for number, (layer_id, pool) in enumerate(order):
        step_until(world.loads, partial(ticket.counter.landed, layer_id, pool))
        assert [ticket.counter.landed(*each) for each in order] == [
            at <= number for at in range(len(order))
        ]
        ticket.counter.wait_until(layer_id, pool)
    for layer_id in (1, 5, 12):
        ticket.counter.wait_until(layer_id)  # a layer that it doesn't move passes
    ticket.counter.wait_until(3, "side")
    world.close()


def test_a_reader_on_a_compute_stream_does_not_block_its_thread() -> None:
    """Once a layer is enqueued the stream waits for it and the host goes on, as on a GPU."""
    world = World(nsa)
    world.fill_records([4])
    compute = world.device.new_stream("compute")
    blocks = world.take(4)
    world.loads.pause()
    ticket = world.load(blocks, [4])
    all_enqueued(ticket)
    seen: list[Any] = []
    with world.device.use(compute), world.pools.reading(blocks):
        rows = world.pool.get_key_buffer(3)
        compute.enqueue(lambda: seen.append(rows.clone()))
    assert not seen
    world.loads.resume()
    assert compute.synchronize(SECONDS)
    world.expect(blocks, [4])
    assert not poison.is_poison(seen[0].view(24, -1)[blocks])
    world.close()
