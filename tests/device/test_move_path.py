"""Every pool's indices go to where copies read them, and stay there until the copies are done."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device.worlds import PER_PAGE, SECONDS, Make, World, index, mla, nsa, step_until
from rayhicache.core.plan import PoolTransfer, TransferPlan
from rayhicache.device.copier import LoadRequest
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.staging import IndexRing, RingEntry, StagedPlan, Staging
from rayhicache.errors import GateTimeout, InvalidPlan
from rayhicache.testing import poison
from rayhicache.testing.faults import DeviceDecorator, FailingDevice

NOTHING = TransferPlan(group="full", host_indices=None, device_indices=None)


class Spy(DeviceDecorator):
    """Notes what is moved, recorded and copied, in order."""

    def __init__(self, inner: CpuDevice) -> None:
        super().__init__(inner)
        self.log: list[tuple[str, int]] = []

    def upload(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        target = super().upload(source, stream)
        self.log.append(("upload", target.data_ptr()))
        return target

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.log.append(("record", tensor.data_ptr()))
        super().record_on_stream(tensor, stream)

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        self.log.append(("copy", 0))
        yield from super().copy(staged, stream)


class Forgetful(DeviceDecorator):
    """Recording on a stream is taken out."""

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Forget it."""


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("num_pools", [1, 2, 3])
def test_two_runs_of_indices_a_pool_are_moved_and_recorded_before_the_first_copy(
    num_pools: int, direction: Direction
) -> None:
    makes: list[Make] = [mla, index, lambda d, g: mla(d, g, name="draft", layer_ids=[9])]
    spy = Spy(CpuDevice())
    world = World(*makes[:num_pools], device=spy)
    blocks = world.take(8)
    ticket = (world.load if direction is Direction.LOAD else world.store)(blocks, [4, 1])
    assert ticket.result(SECONDS)
    (upload,) = [place for what, place in spy.log if what == "upload"]
    records = [place for what, place in spy.log if what == "record"]
    run = 8 * len(blocks)
    assert sorted(records) == [upload + run * at for at in range(2 * num_pools)]
    kinds = [what for what, _ in spy.log]
    assert kinds == ["upload"] + ["record"] * 2 * num_pools + ["copy"]
    world.close()


def reuse(world: World, count: int) -> list[torch.Tensor]:
    """Tensors of the size of a load's indices, full of other ids that are legal: block 0."""
    gc.collect()
    size = 2 * count * len(world.layout.pools)
    return [world.device.empty((size,), torch.int64).fill_(0) for _ in range(16)]


def load_by_hand(world: World, blocks: Sequence[int], slots: Sequence[int]) -> None:
    """Enqueue a load on a paused stream, uploads done, and drop every reference to its plan."""
    stream = world.device.new_stream("mine")
    staging = Staging(world.device, world.space, stream)
    staged = staging.move_hybrid_indices([world.plan(blocks, slots)], Direction.LOAD)
    assert staged is not None
    assert stream.synchronize(SECONDS)
    stream.pause()
    staging.record_transfer_indices_on_stream(
        stream, staged.host_indices, staged.device_indices, staged.pool_transfers
    )
    assert list(world.device.copy(staged, stream))
    del staged
    junk = reuse(world, len(blocks))
    stream.resume()
    assert stream.synchronize(SECONDS)
    del junk


def test_recorded_indices_outlive_their_plan() -> None:
    """The recording alone, with keeping alive taken out (R7)."""
    world = World(nsa, device=DeviceDecorator(CpuDevice()))
    world.fill_records([4, 1])
    blocks = world.take(9)[1:]
    load_by_hand(world, blocks, [4, 1])
    world.expect(blocks, [4, 1])
    world.close()


def test_without_both_protections_a_load_is_garbled() -> None:
    """So the tests beside this one have something to see."""
    world = World(nsa, device=Forgetful(CpuDevice()))
    world.fill_records([4, 1])
    blocks = world.take(9)[1:]
    load_by_hand(world, blocks, [4, 1])
    with pytest.raises(AssertionError, match="holds poison"):
        world.expect(blocks, [4, 1])
    world.close()


def test_a_plan_in_flight_keeps_its_indices_alive() -> None:
    """Keeping alive alone, with the recording taken out (R7)."""
    world = World(nsa, device=Forgetful(CpuDevice()))
    world.fill_records([4, 1])
    blocks = world.take(9)[1:]
    world.loads.pause()
    tickets = [world.load(blocks, [4, 1])]
    world.loads.step(1)  # the upload
    assert world.loads.wait_pending(13)  # all is enqueued: (copy, record) x 6, finish
    counter = tickets.pop().counter
    junk = reuse(world, len(blocks))
    world.loads.resume()
    counter.wait_all()
    world.expect(blocks, [4, 1])
    del junk
    world.close()


@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
def test_the_caller_s_plans_are_left_as_they_are(end: str) -> None:
    """R8: whatever becomes of the load."""
    inner = CpuDevice()
    device = FailingDevice.at(inner, Direction.LOAD, 2 if end == "failed" else -1)
    world = World(nsa, device=device)
    plans = [world.plan(world.take(4), [slot]) for slot in (4, 1)]
    before = copy.deepcopy(plans)
    world.loads.pause()
    ticket = world.copier.start_loading(
        [LoadRequest(id=str(i), plan=p) for i, p in enumerate(plans)]
    )
    if end == "cancelled":
        ticket.cancel()
    world.loads.resume()
    outcome = ticket.result(SECONDS)
    assert outcome is not None
    assert outcome.done or end != "done"
    assert plans == before
    for plan in plans:
        assert type(plan.host_indices) is tuple
        assert all(type(at) is int for at in plan.device_indices or ())
    world.close()


@pytest.mark.parametrize(
    "plan",
    [
        NOTHING,
        TransferPlan(
            group="full",
            host_indices=None,
            device_indices=None,
            pool_transfers=(PoolTransfer(pool="index", host_indices=None, device_indices=None),),
        ),
    ],
    ids=["no transfers", "both sides None"],
)
def test_a_plan_of_nothing_does_nothing(plan: TransferPlan) -> None:
    world = World(nsa)
    outcome = world.copier.start_loading([LoadRequest(id="a", plan=plan)]).result(SECONDS)
    assert outcome is not None
    assert outcome.done
    world.expect([], [])
    assert all(poison.is_poison(t) for m in world.memories.values() for t in m.components)
    world.close()


def transfer(host: tuple[int, ...] | None, device: tuple[int, ...] | None) -> PoolTransfer:
    return PoolTransfer(pool="index", host_indices=host, device_indices=device)


BAD = [
    ((0,), (0,), None, "left behind"),
    ((0,), None, None, "one side"),
    ((0,), (0,), transfer((0,), None), "one side"),
    ((0,), (0,), transfer(None, None), "left behind"),
    ((0, 1), (0,), transfer((0,), (0,)), "2 host and 1 device"),
    ((24,), (0,), transfer((0,), (0,)), r"'kv' has host index 24 outside \[0, 24\)"),
    ((0,), (24,), transfer((0,), (0,)), r"'kv' has device index 24 outside \[0, 24\)"),
    ((0,), (0,), transfer((0,), (-1,)), r"'index' has device index -1 outside \[0, 24\)"),
    ((0,), (0,), transfer((99,), (0,)), r"'index' has host index 99 outside \[0, 24\)"),
]


@pytest.mark.parametrize(("host", "device", "other", "said"), BAD)
def test_a_bad_plan_is_refused_before_anything_is_enqueued(
    host: tuple[int, ...], device: tuple[int, ...], other: PoolTransfer | None, said: str
) -> None:
    """R8, R13: with pool, index and limit, and no copy, ticket or hold left behind."""
    world = World(nsa)
    world.loads.pause()
    plan = TransferPlan(
        group="full",
        host_indices=host,
        device_indices=device,
        pool_transfers=None if other is None else (other,),
    )
    with pytest.raises(InvalidPlan, match=said):
        world.copier.start_loading([LoadRequest(id="a", plan=plan)])
    world.check()
    staging = Staging(world.device, world.space, world.loads)
    with pytest.raises(InvalidPlan, match=said):
        staging.move_hybrid_indices([plan], Direction.LOAD)
    assert world.loads.pending() == []
    assert staging._ring.in_use() == 0
    world.close()


def test_layer_0_of_every_request_comes_before_layer_1_of_any() -> None:
    """R38."""
    world = World(mla)
    world.fill_records([4, 1])
    first, second = world.take(PER_PAGE), world.take(PER_PAGE)
    requests = [
        LoadRequest(id="a", plan=world.plan(first, [4])),
        LoadRequest(id="b", plan=world.plan(second, [1])),
    ]
    world.loads.pause()
    ticket = world.copier.start_loading(requests)
    rows = world.memories["kv"].components[0]
    for position in range(4):
        step_until(world.loads, partial(ticket.counter.landed, position, "kv"))
        for block in (*first, *second):
            assert not poison.is_poison(rows[position, block])
            assert poison.is_poison(rows[position + 1 :, block]) or position == 3
    world.close()


# ── the ring ────────────────────────────────────────────────────────────────────────────────


def test_two_loads_behind_a_held_stream_both_keep_their_indices() -> None:
    """R26: the second one's staging doesn't overwrite what the first one's upload still reads."""
    world = World(nsa, limits=CopyLimits(ring_indices=128))
    world.fill_records([0, 1, 2, 3])
    blocks = world.take(16)
    world.loads.pause()
    tickets = [world.load(blocks[:8], [0, 1]), world.load(blocks[8:], [2, 3])]
    assert world.loads.wait_pending(2 * 14)
    world.loads.resume()
    assert all(ticket.result(SECONDS) for ticket in tickets)
    world.expect(blocks, [0, 1, 2, 3])
    world.close()


def test_the_ring_wraps_around_under_many_loads() -> None:
    world = World(nsa, limits=CopyLimits(ring_indices=70))
    world.fill_records([0, 1])
    for turn in range(20):
        count = 8 - turn % 3
        blocks = world.take(count)
        poison.poison(world.memories, blocks)
        assert world.load(blocks, [0, 1]).result(SECONDS)
        world.expect(blocks, [0, 1])
        world.pools.free(blocks)
    world.close()


def test_a_plan_larger_than_the_ring_has_memory_of_its_own() -> None:
    """Also when each of its pools alone would fit."""
    world = World(nsa, limits=CopyLimits(ring_indices=40))
    world.fill_records([0, 1])
    blocks = world.take(8)  # 2 pools x 2 sides x 8 = 32 > 20
    assert world.load(blocks, [0, 1]).result(SECONDS)
    world.expect(blocks, [0, 1])
    world.close()


def test_a_full_ring_blocks_then_fails_the_ticket_and_leaves_nothing_behind() -> None:
    world = World(nsa, limits=CopyLimits(ring_indices=32, copy_seconds=0.1))
    first, second, third = (world.take(4) for _ in range(3))  # 16 indices each
    world.loads.pause()
    tickets = [world.load(first, [0]), world.load(second, [1])]
    sealed = threading.Event()
    late = world.load(third, [2], prepare=lambda ticket: ticket.on_seal(sealed.set))
    assert sealed.wait(SECONDS)
    world.loads.resume()
    assert all(ticket.result(SECONDS) for ticket in tickets)
    outcome = late.result(SECONDS)
    assert outcome is not None
    assert "hold the ring" in outcome.cause
    assert isinstance(late.fault, GateTimeout)
    assert world.copier._lanes[Direction.LOAD]._staging._ring.in_use() == 0
    assert world.load(third, [2]).result(SECONDS)
    world.close()


def ring(capacity: int) -> IndexRing:
    device = CpuDevice()
    device.close()
    return IndexRing(device, capacity)


def test_a_retired_entry_makes_room_in_order() -> None:
    it = ring(10)
    entries = [it.take(5, 0), it.take(4, 0)]
    with pytest.raises(GateTimeout):
        it.take(4, 0.01)
    it.retire(entries[1])  # not the oldest: its room comes back with the one before
    with pytest.raises(GateTimeout):
        it.take(4, 0.01)
    it.retire(entries[0])
    assert it.take(4, 0).start == 0


@given(st.lists(st.one_of(st.integers(1, 9), st.sampled_from([-1, -2, -3])), max_size=60))
def test_live_entries_of_the_ring_never_overlap(steps: list[int]) -> None:
    it = ring(16)
    live: list[RingEntry] = []
    for step in steps:
        if step < 0:
            if live:
                it.retire(live.pop(min(-step, len(live)) - 1))
            continue
        try:
            entry = it.take(step, 0)
        except GateTimeout:
            assert it.in_use() > 0
            continue
        if entry.memory.untyped_storage().data_ptr() == it._memory.untyped_storage().data_ptr():
            live.append(entry)
        taken = [at for e in live for at in range(e.start, e.start + e.size)]
        assert len(taken) == len(set(taken))
        assert all(0 <= at < 16 for at in taken)


def test_a_batch_of_many_requests_is_one_plan() -> None:
    spy = Spy(CpuDevice())
    world = World(mla, device=spy)
    plans = [world.plan(world.take(PER_PAGE), [n]) for n in range(5)]
    requests = [LoadRequest(id="a", plan=plan) for plan in plans]
    assert world.copier.start_loading(requests).result(SECONDS)
    assert [what for what, _ in spy.log].count("upload") == 1
    world.close()
