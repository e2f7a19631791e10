"""A forward finds its tickets by the blocks that it reads, and writers can't disturb a copy."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest
import torch

from device.worlds import BLOCK, SECONDS, Reader, World, mla, nsa
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Direction
from rayhicache.device.ticket import Ticket
from rayhicache.errors import CaptureRefused, LoadFailed, PageBusy
from rayhicache.testing import poison
from rayhicache.testing.faults import FailingDevice

ROWS = torch.ones(1, 1, 8), torch.ones(1, 1, 4)


def failed_load(world: World, blocks: list[int]) -> Ticket:
    ticket = world.load(blocks, [0])
    outcome = ticket.result(SECONDS)
    assert outcome is not None
    assert not outcome.done
    return ticket


def failing_world(layer_id: int = 2) -> World:
    inner = CpuDevice(wait_seconds=SECONDS)
    return World(mla, device=FailingDevice.at(inner, Direction.LOAD, layer_id))


def test_a_binding_finds_the_loads_of_its_blocks_and_no_others() -> None:
    world = World(nsa)
    world.loads.pause()
    first, second, third = (world.take(4) for _ in range(3))
    a, b = world.load(first, [0]), world.load(second, [1])
    find = world.pools.reading
    assert find([first[3]]).tickets == (a,)
    assert find([*second, *first]).tickets == (a, b)
    assert find(third).tickets == ()
    assert find({"index": second, "kv": third}).tickets == (b,)
    world.close()


def test_interleaved_micro_batches_do_not_mix() -> None:
    world = World(mla)
    world.loads.pause()
    mine, other = world.take(4), world.take(4)
    world.load(mine, [0])
    waits, free = world.pools.reading(mine), world.pools.reading(other)
    with free:
        world.pool.get_key_buffer(0)
    reader = Reader(world.device, lambda: _read_in(world, waits))
    assert reader.next() == "blocked"
    with free:
        world.pool.get_key_buffer(0)
        with free:
            world.pool.get_key_buffer(1)
        world.pool.get_key_buffer(2)
    world.loads.resume()
    reader.value()
    world.close()


def _read_in(world: World, binding: Any) -> object:
    with binding:
        return world.pool.get_key_buffer(0)


def test_a_nested_binding_gives_way_to_the_outer_one() -> None:
    world = World(mla)
    world.loads.pause()
    mine, other = world.take(4), world.take(4)
    world.load(mine, [0])

    def forward() -> None:
        with world.pools.reading(mine):
            with world.pools.reading(other):
                world.pool.get_key_buffer(0)
            world.pool.get_key_buffer(0)

    reader = Reader(world.device, forward)
    assert reader.next() == "blocked"
    world.loads.resume()
    reader.value()
    world.close()


class NoLock:
    def __enter__(self) -> NoReturn:
        pytest.fail("an empty binding took the lock and walked the tickets")

    def __exit__(self, *_: object) -> None: ...


def test_an_empty_binding_walks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(mla)
    with monkeypatch.context() as patch:
        patch.setattr(world.gate, "_lock", NoLock())
        with world.pools.reading(range(24), writes=[1]):
            world.pool.get_key_buffer(0)
    world.close()


def test_a_capture_is_refused_while_loads_are_open() -> None:
    world = World(mla)
    world.loads.pause()
    blocks = world.take(4)
    ticket = world.load(blocks, [0])
    with pytest.raises(CaptureRefused, match=str(ticket.id)):
        world.pools.reading(blocks).check_capture()
    world.pools.reading([20]).check_capture()
    world.loads.resume()
    assert ticket.result(SECONDS)
    world.pools.reading(blocks).check_capture()
    world.close()


def test_a_read_in_a_capture_is_refused_instead_of_waited_for() -> None:
    world = World(mla)
    world.loads.pause()
    blocks = world.take(4)
    ticket = world.load(blocks, [0])
    capturing = True
    binding = world.gate.bind(blocks, capturing=lambda: capturing)
    with binding, pytest.raises(CaptureRefused, match="wait_all"):
        world.pool.get_key_buffer(0)
    with world.gate.bind([20], capturing=lambda: capturing):
        world.pool.get_key_buffer(0)
    world.loads.resume()
    capturing = False
    with binding:
        world.pool.get_key_buffer(0)  # the same binding waits where nothing is captured
    assert ticket.result(SECONDS)
    capturing = True
    with world.gate.bind(blocks, capturing=lambda: capturing):
        world.pool.get_key_buffer(0)
    world.close()


def test_a_write_in_a_capture_is_refused_while_a_store_reads_the_block() -> None:
    world = World(mla)
    world.stores.pause()
    blocks = world.take(4)
    ticket = world.store(blocks, [0])
    binding = world.gate.bind((), blocks, capturing=lambda: True)
    with binding, pytest.raises(CaptureRefused, match="store"):
        world.pool._writable(0)
    world.stores.resume()
    assert ticket.result(SECONDS)
    with world.gate.bind((), blocks, capturing=lambda: True):
        world.pool._writable(0)
    world.close()


def test_a_graph_may_be_replayed_after_wait_all() -> None:
    """A replay reads memory without a reader: nothing of it is gated."""
    world = World(mla)
    world.fill_records([0])
    world.loads.pause()
    blocks = world.take(4)
    memory = world.memories["kv"].components[0]
    ticket = world.load(blocks, [0])
    before = memory[:, blocks].clone()
    world.loads.resume()
    ticket.wait_all()
    after = memory[:, blocks].clone()
    assert poison.is_poison(before)
    assert not poison.is_poison(after)
    world.close()


def test_writing_a_block_that_a_load_fills_is_refused() -> None:
    world = World(mla)
    world.loads.pause()
    blocks = world.take(4)
    ticket = world.load(blocks, [0])
    with pytest.raises(PageBusy, match=f"tickets \\[{ticket.id}\\]"):
        world.pools.reading(blocks, writes=[blocks[2]])
    with pytest.raises(PageBusy):
        world.load(blocks[3:], [1])
    with pytest.raises(PageBusy):
        world.store(blocks[3:], [1])
    world.loads.resume()
    assert ticket.result(SECONDS)
    assert world.pools.reading(blocks, writes=blocks).tickets == ()
    world.close()


def test_loading_into_blocks_that_a_store_reads_is_refused() -> None:
    world = World(mla)
    world.stores.pause()
    blocks = world.take(4)
    world.store(blocks, [0])
    with pytest.raises(PageBusy):
        world.load(blocks, [1])
    assert world.copier.num_open() == 1
    world.close()


def test_two_stores_may_read_the_same_blocks() -> None:
    world = World(mla)
    world.stores.pause()
    blocks = world.take(4)
    world.fill_blocks(blocks, [3])
    tickets = [world.store(blocks, [0]), world.store(blocks, [1])]
    world.pools.free(blocks)
    world.stores.resume()
    assert all(ticket.result(SECONDS) for ticket in tickets)
    assert world.pools.allocator.num_free() == 24
    world.close()


def test_a_writer_waits_for_the_store_that_reads_its_blocks() -> None:
    """The host gets what was there when the store began (R11)."""
    world = World(mla)
    blocks = world.take(4)
    world.fill_blocks(blocks, [3])
    world.stores.pause()
    ticket = world.store(blocks, [0])
    loc = torch.tensor([blocks[0] * BLOCK])

    def forward() -> None:
        with world.pools.reading(blocks, writes=blocks):
            world.pool.set_kv_buffer(0, loc, *ROWS)

    writer = Reader(world.device, forward)
    assert writer.next() == "blocked"
    world.stores.resume()
    writer.value()
    assert ticket.result(SECONDS)
    poison.poison(world.memories)
    assert world.load(blocks, [0]).result(SECONDS)
    world.expect(blocks, [3])
    world.close()


# ── what a failed load leaves ───────────────────────────────────────────────────────────────


def test_blocks_of_a_failed_load_fail_later_readers_too() -> None:
    world = failing_world()
    blocks = world.take(4)
    ticket = failed_load(world, blocks)
    for _ in range(2):
        with world.pools.reading([blocks[1]]):
            world.pool.get_key_buffer(0)  # these layers had landed
            with pytest.raises(LoadFailed) as failed:
                world.pool.get_key_buffer(2)
    assert failed.value.tickets == (ticket.id,)
    assert failed.value.requests == ("a",)
    with world.pools.reading([23]):
        world.pool.get_key_buffer(2)
    world.close()


@pytest.mark.parametrize("how", ["written", "freed", "reloaded"])
def test_until_they_are(how: str) -> None:
    world = failing_world()
    blocks = world.take(4)
    failed_load(world, blocks)
    if how == "written":
        world.pools.reading(blocks, writes=blocks)
    elif how == "freed":
        world.pools.free(blocks)
        assert world.take(4) == blocks[::-1]
    else:
        assert isinstance(world.device, FailingDevice)
        world.device.heal()
        assert world.load(blocks, [0]).result(SECONDS)
    with world.pools.reading(blocks):
        world.pool.get_key_buffer(2)
    assert not world.gate._lost
    world.close()


def test_only_the_blocks_written_are_forgotten() -> None:
    world = failing_world()
    blocks = world.take(4)
    failed_load(world, blocks)
    world.pools.reading(blocks, writes=blocks[:2])
    with world.pools.reading(blocks[:2]):
        world.pool.get_key_buffer(2)
    with world.pools.reading(blocks), pytest.raises(LoadFailed):
        world.pool.get_key_buffer(2)
    world.close()


def test_a_failed_load_is_never_in_neither_table() -> None:
    """`bind` looks at both without the lock, so it must not close before it is lost."""
    world = failing_world()
    lost = threading.Event()

    class Watched(dict[int, Ticket]):
        def __delitem__(self, number: int) -> None:
            if number in world.gate._lost:
                lost.set()
            super().__delitem__(number)

    world.gate._open = Watched()
    failed_load(world, world.take(4))
    assert lost.is_set()
    world.close()


def test_blocks_of_a_load_that_was_given_up_can_be_computed_at_once() -> None:
    """The write waits for the load's last copy; what isn't written stays lost."""
    world = failing_world()
    blocks = world.take(4)
    world.loads.pause()
    sealed = threading.Event()
    ticket = world.load(blocks, [0], prepare=lambda made: made.on_seal(sealed.set))

    def forward() -> None:
        with world.pools.reading(blocks):
            for layer_id in range(4):
                world.pool.get_key_buffer(layer_id)

    reader = Reader(world.device, forward)
    assert reader.next() == "blocked"
    assert sealed.wait(SECONDS)
    loc = torch.tensor([blocks[0] * BLOCK])

    def recompute() -> None:
        with world.pools.reading(blocks, writes=blocks[:1]):
            world.pool.set_kv_buffer(0, loc, *ROWS)

    writer = Reader(world.device, recompute)
    assert writer.next() == "blocked"
    world.loads.resume()
    writer.value()
    with pytest.raises(LoadFailed):
        reader.value()
    assert ticket.result(SECONDS)
    with world.pools.reading(blocks[:1]):
        world.pool.get_key_buffer(3)
    with world.pools.reading(blocks[1:]), pytest.raises(LoadFailed):
        world.pool.get_key_buffer(3)
    world.close()
