"""The counter blocks, raises or passes, and its events are its own (R3)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from device.worlds import (
    NUM_BLOCKS,
    SECONDS,
    Reader,
    World,
    all_enqueued,
    held_world,
    nsa,
    outcome_of,
    read,
)
from rayhicache.device.counter import LayerTransferCounter
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Direction, Event, Landing, Stream
from rayhicache.device.staging import StagedPlan
from rayhicache.device.ticket import Ticket, TicketState
from rayhicache.errors import GateTimeout, LoadFailed, QueueFull
from rayhicache.testing import poison
from rayhicache.testing.faults import BreakingDevice, DeviceDecorator, FailingDevice


def test_a_layer_that_is_not_enqueued_blocks_its_reader_and_the_wait_is_measured() -> None:
    world, barrier = held_world(2)
    world.fill_records([4])
    blocks = world.take(4)
    asked = threading.Event()

    class Telling(threading.Condition):
        def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
            asked.set()
            return super().wait_for(predicate, timeout)

    def watch(ticket: Ticket) -> None:
        ticket.counter._changed = Telling()

    ticket = world.load(blocks, [4], prepare=watch)
    assert barrier.reached.wait(SECONDS)
    read(world, 1, blocks)  # enqueued, so it goes on
    assert not asked.is_set()
    reader = Reader(world.device, lambda: read(world, 2, blocks))
    assert asked.wait(SECONDS)
    assert reader.news.empty()
    barrier.open.set()
    rows = reader.value()
    assert not poison.is_poison(rows.view(NUM_BLOCKS, -1)[blocks])
    assert outcome_of(ticket).done
    assert set(ticket.counter.stalls()) == {2}
    assert ticket.counter.stalls()[2] > 0
    world.expect(blocks, [4])
    world.close()


def test_a_layer_that_is_never_enqueued_ends_in_a_time_out() -> None:
    world, barrier = held_world(2, wait_seconds=0.05)
    blocks = world.take(4)
    ticket = world.load(blocks, [4])
    assert barrier.reached.wait(SECONDS)
    with pytest.raises(GateTimeout, match="layer 2 of pool 'kv'"):
        read(world, 2, blocks)
    barrier.open.set()
    assert outcome_of(ticket).done
    world.close()


def test_a_failed_layer_raises_before_any_byte_is_used() -> None:
    device = FailingDevice.at(CpuDevice(wait_seconds=SECONDS), Direction.LOAD, 2)
    world = World(nsa, device=device)
    blocks = world.take(4)
    world.loads.pause()
    ticket = world.load(blocks, [4])
    reader = Reader(world.device, lambda: read(world, 2, blocks))
    assert reader.next() == "blocked"  # for the copies that were enqueued: they may still land
    assert ticket.state is TicketState.SEALED
    world.loads.resume()
    with pytest.raises(LoadFailed, match="asked to fail at layer 2") as failed:
        reader.value()
    assert failed.value.requests == ("a",)
    assert not outcome_of(ticket).done
    world.close()


@pytest.mark.parametrize("broken", [0, 2])
def test_a_copy_stream_that_breaks_fails_its_readers(broken: int) -> None:
    """Its events are recorded and pass, yet no reader may believe them."""
    world = World(nsa, device=BreakingDevice(CpuDevice(wait_seconds=SECONDS), broken))
    world.fill_records([4])
    blocks = world.take(4)
    ticket = world.load(blocks, [4])
    for layer_id in range(broken, 4):
        with pytest.raises(LoadFailed, match="asked to break"):
            read(world, layer_id, blocks)
    assert not outcome_of(ticket).done
    for layer_id in range(4):
        with pytest.raises(LoadFailed):
            read(world, layer_id, blocks)
    world.close()


class Noting(DeviceDecorator):
    """Notes the events of each plan."""

    def __init__(self, inner: CpuDevice) -> None:
        super().__init__(inner)
        self.events: list[list[Event]] = []

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        mine: list[Event] = []
        self.events.append(mine)
        for landing in super().copy(staged, stream):
            mine += landing.events
            yield landing


def test_events_are_not_reused_while_their_ticket_lives() -> None:
    device = Noting(CpuDevice(wait_seconds=SECONDS))
    world = World(nsa, device=device)
    blocks = world.take(24)
    assert outcome_of(world.load(blocks[:1], [0])).done
    world.loads.pause()
    tickets = [world.load([block], [0]) for block in blocks[1:]]
    for ticket in tickets:
        all_enqueued(ticket)
    fresh = [event for events in device.events[1:] for event in events]
    assert len({id(event) for event in fresh}) == len(fresh) == 23 * 6
    assert {id(event) for event in device.events[0]} <= {id(event) for event in fresh}
    world.loads.resume()
    assert all(outcome_of(ticket).done for ticket in tickets)
    world.close()


def test_many_tickets_may_be_open_and_the_next_one_waits_for_room() -> None:
    limits = CopyLimits(tickets_max=20, submit_seconds=0.05)
    world = World(nsa, limits=limits)
    blocks = world.take(24)
    world.loads.pause()
    tickets = [world.load([block], [0]) for block in blocks[:20]]
    with pytest.raises(QueueFull, match="20 tickets"):
        world.load(blocks[20:21], [0])
    assert world.copier.num_open() == 20
    assert world.pools.allocator.num_held() == 20
    world.loads.resume()
    assert all(outcome_of(ticket).done for ticket in tickets)
    assert outcome_of(world.load(blocks[20:21], [0])).done
    world.close()


def test_a_wait_for_what_the_ticket_does_not_move_passes() -> None:
    counter = LayerTransferCounter(
        CpuDevice(), {"kv": [3], "index": [0]}, requests=["a"], ticket=1, wait_seconds=0
    )
    counter.wait_until(1)
    counter.wait_until(3, "index")
    with pytest.raises(GateTimeout):
        counter.wait_until(3)
    assert not counter.landed(3, "kv")
