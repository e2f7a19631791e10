"""A ticket owns its blocks until no copy can land."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from device.worlds import (
    NUM_BLOCKS,
    SECONDS,
    Barrier,
    Reader,
    World,
    held_world,
    mla,
    nsa,
    outcome_of,
)
from rayhicache.core.plan import TransferPlan
from rayhicache.device.copier import StoreRequest
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Direction, Event
from rayhicache.device.ticket import Outcome, Ticket, TicketState
from rayhicache.errors import InvalidPlan, LoadFailed, TierClosed
from rayhicache.testing import poison
from rayhicache.testing.faults import FailingDevice


def test_the_submit_call_itself_makes_a_ticket_that_blocks() -> None:
    """R25: nothing can be recorded before its copy: the ticket is gated from its first moment."""
    world, barrier = held_world(0)
    blocks = world.take(4)
    ticket = world.load(blocks, [4])
    assert barrier.reached.wait(SECONDS)
    for layer_id, pool in [(0, "kv"), (0, "index"), (3, "kv")]:
        assert not ticket.counter.landed(layer_id, pool)
    assert not any(name.startswith("record") for name in dir(ticket))
    barrier.open.set()
    assert outcome_of(ticket).done
    world.close()


def test_an_export_waits_for_every_layer_of_every_pool() -> None:
    """R4: reading a page for a peer while its own load is pending."""
    world = World(nsa)
    world.fill_records([4])
    blocks = world.take(4)
    world.loads.pause()
    ticket = world.load(blocks, [4])

    def export() -> None:
        ticket.wait_all()
        world.expect(blocks, [4])

    peer = Reader(world.device, export)
    assert peer.next() == "blocked"
    world.loads.resume()
    peer.value()
    world.close()


def test_an_export_of_a_failed_load_raises() -> None:
    world = World(nsa, device=FailingDevice.at(CpuDevice(), Direction.LOAD, 3))
    ticket = world.load(world.take(4), [4])
    with pytest.raises(LoadFailed):
        ticket.wait_all()
    world.close()


# Of one ticket: an upload, six layers with their events, the finish. A store waits for the
# caller's stream before them, and for the digests beside them, which have an event too.
OPERATIONS = {Direction.LOAD: 14, Direction.STORE: 18}


@pytest.mark.parametrize("stage", ["queued", "half-way", "enqueued", "closed"])
@pytest.mark.parametrize("direction", Direction)
def test_a_cancel_at_any_stage_gives_every_block_back(direction: Direction, stage: str) -> None:
    """R16. The blocks stay the ticket's until its stream has passed."""
    world, barrier = held_world(2)
    start = world.load if direction is Direction.LOAD else world.store
    stream = world.stream(direction)
    stream.pause()
    blocks = world.take(NUM_BLOCKS)
    before = start(blocks[:4], [0])
    assert barrier.reached.wait(SECONDS)
    ticket = before if stage == "half-way" else start(blocks[4:8], [1])
    if stage in ("queued", "half-way"):
        ticket.cancel()
        world.pools.free(blocks)
        barrier.open.set()
    else:
        barrier.open.set()
        assert stream.wait_pending(2 * OPERATIONS[direction])
        if stage == "closed":
            stream.resume()
            assert outcome_of(ticket).done
        ticket.cancel()
        world.pools.free(blocks)
    if stage != "closed":
        assert world.pools.allocator.num_free() < NUM_BLOCKS
        assert ticket.result(0) is None
        stream.resume()
    assert outcome_of(before)
    assert outcome_of(ticket).done == (stage in ("enqueued", "closed"))
    if stage == "queued":
        assert outcome_of(ticket).cause == "cancelled"
    assert world.pools.allocator.num_free() == NUM_BLOCKS
    world.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("direction", Direction)
def test_seeded_faults_leak_nothing(direction: Direction, seed: int) -> None:
    world = World(nsa, device=FailingDevice.seeded(CpuDevice(), seed=seed, probability=0.2))
    for turn in range(12):
        blocks = world.take(4)
        start = world.load if direction is Direction.LOAD else world.store
        ticket = start(blocks, [turn % 6])
        outcome_of(ticket)
        world.pools.free(blocks)
    assert world.pools.allocator.num_free() == NUM_BLOCKS
    world.close()


def test_a_late_copy_seals_its_ticket_until_the_stream_has_passed() -> None:
    world = World(nsa, limits=CopyLimits(copy_seconds=0.05))
    blocks = world.take(NUM_BLOCKS)
    sealed, closed = threading.Event(), list[Outcome]()
    calls: list[str] = []

    def prepare(ticket: Ticket) -> None:
        ticket.on_seal(lambda: calls.append("seal"))
        ticket.on_seal(sealed.set)
        ticket.on_close(closed.append)

    world.loads.pause()
    ticket = world.load(blocks[:4], [0], prepare=prepare)
    world.pools.free(blocks[:4])
    assert sealed.wait(SECONDS)
    assert ticket.state is TicketState.SEALED
    assert world.pools.allocate(1) is None
    assert closed == []
    world.loads.resume()
    outcome = outcome_of(ticket)
    assert closed == [outcome]
    assert outcome.late
    assert "weren't done" in outcome.cause
    assert calls == ["seal"]
    assert world.pools.allocator.num_free() == 4
    world.close()


def test_a_cancelled_ticket_that_is_late_as_well_is_sealed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barrier = Barrier(2)
    device = FailingDevice(CpuDevice(), barrier)
    world = World(nsa, device=device, limits=CopyLimits(copy_seconds=0.05))
    calls: list[str] = []
    late = threading.Event()
    world.loads.pause()
    ticket = world.load(
        world.take(4), [0], prepare=lambda ticket: ticket.on_seal(lambda: calls.append("seal"))
    )
    fail = ticket.counter.fail

    def seen(cause: str, last: Event | None) -> None:
        fail(cause, last)
        if "weren't done" in cause:
            late.set()

    monkeypatch.setattr(ticket.counter, "fail", seen)
    assert barrier.reached.wait(SECONDS)
    ticket.cancel()
    barrier.open.set()
    assert late.wait(SECONDS)
    world.loads.resume()
    assert outcome_of(ticket).cause == "cancelled"
    assert calls == ["seal"]
    world.close()


# ── stores whose plan comes late ────────────────────────────────────────────────────────────


def store_with(world: World, plan: Any, blocks: list[int]) -> Ticket:
    owned = dict.fromkeys(world.pools.pools, tuple(blocks))
    return world.copier.start_writing([StoreRequest(id="s", blocks=owned, plan=plan)])


def test_a_store_without_a_plan_closes_and_lets_writers_through() -> None:
    world = World(nsa)
    planned = threading.Event()
    world.stores.pause()
    blocks = world.take(4)
    ticket = store_with(world, lambda: planned.set(), blocks)
    assert planned.wait(SECONDS)
    assert world.stores.wait_pending(1)
    binding = world.pools.reading(blocks, writes=blocks)
    writer = Reader(world.device, lambda: binding.check_write("kv"))
    world.stores.resume()
    writer.value()
    assert outcome_of(ticket).done
    world.close()


def test_a_fault_in_a_store_s_plan_fails_the_ticket_and_not_the_lane() -> None:
    world = World(nsa)
    blocks = world.take(4)
    ticket = store_with(world, lambda: {"here": None}["gone"], blocks)
    assert "gone" in outcome_of(ticket).cause
    assert isinstance(ticket.fault, KeyError)
    assert outcome_of(world.store(blocks, [0])).done
    world.close()


def test_a_plan_may_move_only_what_its_ticket_owns() -> None:
    """Else blocks that nobody holds would be read, or their next owner's bytes be stored."""
    world = World(nsa)
    blocks, others = world.take(4), world.take(4)
    plan: TransferPlan = world.plan(others, [0])
    ticket = store_with(world, lambda: plan, blocks)
    assert not outcome_of(ticket).done
    assert isinstance(ticket.fault, InvalidPlan)
    assert poison.is_poison(world.host)
    world.close()


def test_layers_that_a_store_did_not_move_do_not_hold_writers() -> None:
    """The pages' group had room and the state's had none: its pool isn't in the plan."""
    world = World(
        mla,
        lambda d, g: mla(d, g, name="state", group="state", layer_ids=[9]),
        limits=CopyLimits(wait_seconds=0.2),
    )
    blocks = world.take(4)
    plan = world.plan(blocks, [0])
    world.stores.pause()
    ticket = store_with(world, lambda: plan, blocks)
    for layer_id in range(4):
        ticket.counter._await_record(layer_id, "kv")
    binding = world.pools.reading(blocks, writes=blocks)
    writer = Reader(world.device, lambda: binding.check_write("state"))
    assert writer.next() == "blocked"
    world.stores.resume()
    writer.value()
    assert outcome_of(ticket).done
    world.close()


# ── the end ─────────────────────────────────────────────────────────────────────────────────


def test_close_drains_what_has_started_and_refuses_more() -> None:
    world = World(nsa)
    blocks = world.take(8)
    world.loads.pause()
    ticket = world.load(blocks[:4], [0])
    assert world.loads.wait_pending(14)
    assert not world.copier.close(0.05)
    assert ticket.result(0) is None
    world.loads.resume()
    assert world.copier.close(SECONDS)
    assert outcome_of(ticket).done
    for start in (world.load, world.store):
        with pytest.raises(TierClosed):
            start(blocks[4:], [0])
    world.close()


def test_close_cancels_what_has_not_started() -> None:
    world, barrier = held_world(0)
    blocks = world.take(8)
    first, second = world.load(blocks[:4], [0]), world.load(blocks[4:], [1])
    assert barrier.reached.wait(SECONDS)
    assert not world.copier.close(0)
    barrier.open.set()
    assert world.copier.close(SECONDS)
    assert outcome_of(first).done
    assert outcome_of(second).cause == "cancelled"
    world.close()


@pytest.mark.parametrize("direction", Direction)
def test_a_callback_that_fails_takes_no_lane_with_it(direction: Direction) -> None:
    world = World(mla)
    blocks = world.take(4)
    begin = world.load if direction is Direction.LOAD else world.store

    def broken(outcome: Outcome) -> None:
        raise KeyError("a bug of the caller")

    ticket = begin(blocks, [0], prepare=lambda made: made.on_close(broken))
    assert ticket.result(SECONDS) == Outcome(done=True, cause="", late=False)
    assert isinstance(ticket.fault, KeyError)
    assert begin(blocks, [0]).result(SECONDS) == Outcome(done=True, cause="", late=False)
    world.close()
