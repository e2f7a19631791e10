"""Digests of a store's pages, from the device's blocks: those of the records that it makes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.worlds import SECONDS, World, all_enqueued, nsa
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import ComponentSpec, PoolSpec, RecordLayout
from rayhicache.core.plan import plan_pages
from rayhicache.core.slots import SlotRef
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.digests import PageSums
from rayhicache.device.protocols import Direction, Stream
from rayhicache.device.staging import StagedPlan, Staging
from rayhicache.errors import InvalidPlan
from rayhicache.memory.digest import placed_sums, record_digests
from rayhicache.testing.device_conformance import FIRST_SLOT, make_space
from rayhicache.testing.faults import DeviceDecorator

BLOCKS, SLOTS = 48, 8


@st.composite
def layouts(draw: st.DrawFn) -> RecordLayout:
    return RecordLayout(
        page_tokens=4,
        pools=tuple(
            PoolSpec(
                name=f"p{number}",
                layer_ids=tuple(sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=4)))),
                components=tuple(
                    ComponentSpec(
                        name=f"c{at}", block_bytes=draw(st.integers(0, 40)), dtype="uint8"
                    )
                    for at in range(draw(st.integers(1, 3)))
                ),
                block_tokens=4 // draw(st.sampled_from([1, 2, 4])),
            )
            for number in range(draw(st.integers(1, 3)))
        ),
        num_layer_groups=draw(st.integers(1, 4)),
    )


@settings(max_examples=40, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 2**31))
def test_a_stores_digests_are_those_of_its_records(layout: RecordLayout, seed: int) -> None:
    """Over permuted blocks and slots, several pools, and pages of several blocks."""
    dice = random.Random(seed)
    device = CpuDevice()
    space = make_space(device, layout, num_blocks=BLOCKS, num_slots=SLOTS)
    for memory in space.pools.values():
        for tensor in memory.components:
            tensor.random_(0, 256)
    pages = dice.randint(1, 4)
    slots = [FIRST_SLOT + at for at in dice.sample(range(SLOTS), pages)]
    blocks = {
        pool.name: dice.sample(range(BLOCKS), pages * layout.blocks_per_page(pool.name))
        for pool in layout.pools
    }
    stream = device.new_stream("store")
    plan = plan_pages(layout, "full", slots, blocks)
    staged = Staging(device, space, stream).move_hybrid_indices([plan], Direction.STORE)
    assert staged is not None
    digests = device.digests(staged, stream)
    for _ in device.copy(staged, stream):
        pass
    assert stream.synchronize(SECONDS)
    assert digests.event.query()
    refs = [SlotRef(slot, 5) for slot in slots]
    keys = [PageKey(bytes([slot]) * 16) for slot in slots]
    host = space.regions["full"]
    wanted = record_digests(layout, host.region, host.data, refs, keys)
    assert placed_sums(layout, digests.sums["full"].tolist(), refs, keys) == wanted
    device.close()


def test_digests_come_after_what_the_stream_had_before() -> None:
    """They read blocks that a forward still writes when they are enqueued."""
    device, layout = CpuDevice(), two_blocks_a_page()
    space = make_space(device, layout, num_blocks=4, num_slots=2)
    stream = device.new_stream("store")
    plan = plan_pages(layout, "full", [FIRST_SLOT], {"p0": (2, 1)})
    staged = Staging(device, space, stream).move_hybrid_indices([plan], Direction.STORE)
    assert staged is not None
    stream.pause()

    def write() -> None:
        space.pools["p0"].components[0].zero_()

    stream.enqueue(write)
    digests = device.digests(staged, stream)
    assert not digests.event.query()
    stream.resume()
    assert digests.event.synchronize(SECONDS)
    assert not digests.sums["full"].any()
    device.close()


class BesideDevice(DeviceDecorator):
    """Digests have a stream of their own, as on a GPU; the test holds it."""

    def __init__(self, inner: CpuDevice) -> None:
        super().__init__(inner)
        self.beside = inner.new_stream("beside")
        self.beside.pause()

    def digests(self, staged: StagedPlan, stream: Stream) -> PageSums:
        start = staged.events.take()
        stream.record(start)
        self.beside.wait(start)
        return self.inner.digests(staged, self.beside)


def test_stored_blocks_are_not_reused_before_their_digests_have_read_them() -> None:
    """R11, where the digests come later than the copies."""
    device = BesideDevice(CpuDevice())
    world = World(nsa, device=device)
    blocks = world.take(8)  # two pages of four
    world.fill_blocks(blocks, [3, 5])
    ticket = world.store(blocks, [3, 5])
    all_enqueued(ticket)
    world.pools.free(blocks)
    assert ticket.result(0.1) is None
    assert world.pools.allocator.num_held() == len(blocks)
    device.beside.resume()
    outcome = ticket.result(SECONDS)
    assert outcome is not None
    assert outcome.done
    refs = [SlotRef(slot, 1) for slot in (3, 5)]
    keys = [PageKey(bytes([slot]) * 16) for slot in (3, 5)]
    host = world.space.regions["full"]
    wanted = record_digests(world.layout, host.region, host.data, refs, keys)
    assert placed_sums(world.layout, ticket.sums["full"].tolist(), refs, keys) == wanted
    world.close()


@pytest.mark.parametrize(("skip", "blocks"), [(2, (3,)), (0, (3, 2, 1))])
def test_parts_of_pages_have_no_digest(skip: int, blocks: tuple[int, ...]) -> None:
    device, layout = CpuDevice(), two_blocks_a_page()
    space = make_space(device, layout, num_blocks=4, num_slots=2)
    stream = device.new_stream("store")
    slots = [FIRST_SLOT, FIRST_SLOT + 1][: -(-len(blocks) // 2)]
    plan = plan_pages(layout, "full", slots, {"p0": blocks}, skip_tokens=skip)
    staged = Staging(device, space, stream).move_hybrid_indices([plan], Direction.STORE)
    assert staged is not None
    with pytest.raises(InvalidPlan):
        device.digests(staged, stream)
    device.close()


def two_blocks_a_page() -> RecordLayout:
    component = ComponentSpec(name="c0", block_bytes=24, dtype="uint8")
    pool = PoolSpec(name="p0", layer_ids=(0, 1), components=(component,), block_tokens=2)
    return RecordLayout(page_tokens=4, pools=(pool,))
