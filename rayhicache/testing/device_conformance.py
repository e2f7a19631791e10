"""What every `Device` does, as a suite of tests.

Subclass it in a test module, provide the fixture `device` and say how a stream is held:

    class TestMyDevice(DeviceConformance):
        @pytest.fixture
        def device(self): ...
        def holding(self, device, stream): ...
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from rayhicache.core.keys import PageKey
from rayhicache.core.layout import ComponentSpec, PoolSpec, RecordLayout
from rayhicache.core.plan import TransferPlan, plan_pages
from rayhicache.core.slots import Region, SlotRef
from rayhicache.device.paged import PagedGather, Section
from rayhicache.device.protocols import Device, Direction, Stream
from rayhicache.device.space import HostRegion, PoolMemory, TransferSpace
from rayhicache.device.staging import Staging
from rayhicache.memory.digest import placed_sums, record_digests
from rayhicache.testing import poison

SECONDS = 20.0
FIRST_SLOT = 3  # a region needn't begin at slot 0, and index arithmetic must know


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of some pools under test.

    Attributes:
        name: of the case.
        pools: per pool, bytes of one block of one layer of each component.
        blocks: per pool, device blocks that make a page.
    """

    name: str
    pools: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...] = ()

    def layout(self) -> RecordLayout:
        """Pool i is called "p<i>"; its layers are sparse and differ from its neighbour's."""
        blocks = self.blocks or (1,) * len(self.pools)
        return RecordLayout(
            page_tokens=64,
            pools=tuple(
                PoolSpec(
                    name=f"p{number}",
                    layer_ids=((3, 7, 11), (0, 2, 11))[number % 2],
                    components=tuple(
                        ComponentSpec(name=f"c{at}", block_bytes=width, dtype="uint8")
                        for at, width in enumerate(widths)
                    ),
                    block_tokens=64 // count,
                )
                for number, (widths, count) in enumerate(zip(self.pools, blocks, strict=True))
            ),
        )


GEOMETRIES = (
    Geometry(name="raw fp8 rows", pools=((576,),), blocks=(64,)),
    Geometry(name="packed fp8 rows", pools=((656,),), blocks=(64,)),
    Geometry(name="bf16 rows", pools=((1152,),), blocks=(64,)),
    Geometry(name="index pages", pools=((8448,),)),
    Geometry(name="16 KiB", pools=((16_384,),)),
    Geometry(name="32 KiB", pools=((32_768,),)),
    Geometry(name="latent pages and index pages", pools=((73_728,), (8448,))),
    Geometry(name="odd sizes", pools=((1, 7), (13,))),
    Geometry(name="k-pooled index", pools=((1152,), (33,)), blocks=(4, 1)),
    Geometry(name="zero bytes", pools=((48, 0), (0,), (16,))),
    Geometry(name="keys and values", pools=((2048, 2048),), blocks=(4,)),
    Geometry(name="three pools of other blocks", pools=((96,), (40,), (72, 8)), blocks=(4, 2, 1)),
)


def make_space(
    device: Device, layout: RecordLayout, *, num_blocks: int, num_slots: int
) -> TransferSpace:
    """Both sides of a layout of one group, poisoned all over."""
    memories = {
        spec.name: PoolMemory(
            spec=spec,
            components=tuple(
                device.empty((len(spec.layer_ids), num_blocks, part.block_bytes), torch.uint8)
                for part in spec.components
            ),
            num_blocks=num_blocks,
        )
        for spec in layout.pools
    }
    poison.poison(memories)
    record_bytes = layout.shape().nbytes
    data = device.pinned((num_slots * record_bytes,), torch.uint8).fill_(poison.POISON)
    region = Region(
        group="full",
        first_slot=FIRST_SLOT,
        num_slots=num_slots,
        record_bytes=record_bytes,
        offset=0,
    )
    return TransferSpace(layout, memories, {"full": HostRegion(region=region, data=data)})


class DeviceConformance(ABC):
    """The rules of `Device`, `Stream` and `Event`."""

    @abstractmethod
    def holding(self, device: Device, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """Inside, nothing that is enqueued on the stream runs."""

    def test_an_event_that_was_never_recorded_is_done(self, device: Device) -> None:
        """Waiting on it passes at once, for the host and for a stream."""
        event = device.new_event()
        assert event.query()
        assert event.synchronize(0)
        stream = device.new_stream("a")
        stream.wait(event)
        assert _passes(device, stream)

    def test_an_event_is_done_when_the_work_before_its_record_is(self, device: Device) -> None:
        """And not before."""
        stream, event = device.new_stream("a"), device.new_event()
        with self.holding(device, stream):
            stream.record(event)
            assert not event.query()
            assert not event.synchronize(0.01)
        assert event.synchronize(SECONDS)
        assert event.query()

    def test_a_wait_waits_for_the_last_record_before_it(self, device: Device) -> None:
        """The stream that waits is held; the caller is not."""
        first, then = device.new_stream("a"), device.new_stream("b")
        event, behind = device.new_event(), device.new_event()
        with self.holding(device, first):
            first.record(event)
            then.wait(event)
            then.record(behind)
            assert not behind.synchronize(0.01)
        assert behind.synchronize(SECONDS)

    def test_a_record_after_a_wait_does_not_hold_it(self, device: Device) -> None:
        """Neither one after a wait that passed, nor one after a wait on no record."""
        first, then = device.new_stream("a"), device.new_stream("b")
        event = device.new_event()
        then.wait(event)
        first.record(event)
        assert event.synchronize(SECONDS)
        then.wait(event)
        with self.holding(device, first):
            first.record(event)
            assert _passes(device, then)

    def test_a_record_replaces_the_one_before(self, device: Device) -> None:
        """On another stream too."""
        held, free, event = device.new_stream("a"), device.new_stream("b"), device.new_event()
        with self.holding(device, held):
            held.record(event)
            free.record(event)
            assert event.synchronize(SECONDS)

    def test_streams_run_beside_each_other(self, device: Device) -> None:
        """A held stream doesn't hold its neighbour."""
        held, free = device.new_stream("a"), device.new_stream("b")
        behind = device.new_event()
        with self.holding(device, held):
            held.record(behind)
            assert _passes(device, free)
            assert not behind.query()

    def test_an_upload_brings_the_bytes(self, device: Device) -> None:
        """Once the stream has passed it."""
        stream = device.new_stream("a")
        source = device.pinned((1000,), torch.int64)
        source.copy_(torch.arange(1000))
        target = device.upload(source, stream)
        assert _passes(device, stream)
        assert torch.equal(target.cpu(), torch.arange(1000))

    def test_an_upload_of_nothing_is_nothing(self, device: Device) -> None:
        """An empty transfer is legal."""
        stream = device.new_stream("a")
        assert device.upload(device.pinned((0,), torch.int64), stream).numel() == 0
        assert _passes(device, stream)

    def test_memory_of_a_dead_tensor_is_given_to_the_next(self, device: Device) -> None:
        """At once, when no stream was recorded on it."""
        tensor = device.empty((4099,), torch.int64)
        address = tensor.data_ptr()
        del tensor
        assert device.empty((4099,), torch.int64).data_ptr() == address

    def test_recorded_memory_is_kept_until_the_stream_has_passed(self, device: Device) -> None:
        """And then it is given out again."""
        stream = device.new_stream("a")
        tensor = device.empty((4099,), torch.int64)
        address = tensor.data_ptr()
        event = device.new_event()
        with self.holding(device, stream):
            stream.record(event)
            device.record_on_stream(tensor, stream)
            del tensor
            other = device.empty((4099,), torch.int64)
            assert other.data_ptr() != address
        assert _passes(device, stream)
        again = [device.empty((4099,), torch.int64) for _ in range(2)]
        assert address in {each.data_ptr() for each in again}

    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
    def test_loads_and_stores_are_exact(self, device: Device, geometry: Geometry) -> None:
        """Over permuted blocks and slots, and nothing beside them is touched."""
        layout = geometry.layout()
        space = make_space(device, layout, num_blocks=4 * 64, num_slots=6)
        slots = [FIRST_SLOT + at for at in (4, 0, 3)]
        blocks = _permuted_blocks(layout, pages=3)
        plan = plan_pages(layout, "full", slots, blocks)
        _fill_records(space, slots)
        _run(device, space, plan, Direction.LOAD)
        _check_device(space, blocks)
        kept = space.regions["full"].data.clone()
        space.regions["full"].data.fill_(poison.POISON)
        _run(device, space, plan, Direction.STORE)
        assert torch.equal(space.regions["full"].data, kept)

    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
    def test_digests_are_those_of_the_records_that_a_store_makes(
        self, device: Device, geometry: Geometry
    ) -> None:
        """What lies between fragments in a record counts as nothing."""
        layout = geometry.layout()
        space = make_space(device, layout, num_blocks=4 * 64, num_slots=6)
        slots = [FIRST_SLOT + at for at in (4, 0, 3)]
        plan = plan_pages(layout, "full", slots, _permuted_blocks(layout, pages=3))
        _fill_records(space, slots)
        _run(device, space, plan, Direction.LOAD)
        stream = device.new_stream("store")
        staging = Staging(device, space, stream)
        staged = staging.move_hybrid_indices([plan], Direction.STORE)
        assert staged is not None
        digests = device.digests(staged, stream)
        assert list(device.copy(staged, stream))
        stream.wait(digests.event)
        assert _passes(device, stream)
        host = space.regions["full"]
        refs = [SlotRef(slot, 1) for slot in slots]
        keys = [PageKey(_key(slot) * 4) for slot in slots]
        wanted = record_digests(layout, host.region, host.data, refs, keys)
        assert placed_sums(layout, digests.sums["full"].tolist(), refs, keys) == wanted
        staging.retire(staged)

    @pytest.mark.parametrize("widths", [(128, 4), (128, 0), (7, 3)], ids=str)
    def test_a_gather_follows_no_padding(self, device: Device, widths: tuple[int, int]) -> None:
        """Of a ragged batch, one sequence after the other; empty ones are legal."""
        entries, lengths, tables = 4, [5, 0, 8], [[2, 0, -1], [-7, 10**6, 3], [1, 2, 10**6]]
        blocks = torch.arange(3 * entries * sum(widths)).to(torch.uint8).view(3, -1)
        found = device.gather(
            PagedGather(
                blocks=blocks.to(device.torch_device),
                entries=entries,
                sections=(
                    Section(offset=0, entry_bytes=widths[0]),
                    Section(offset=entries * widths[0], entry_bytes=widths[1]),
                ),
                tables=torch.tensor(tables, device=device.torch_device),
                lengths=torch.tensor(lengths, device=device.torch_device),
                total=sum(lengths),
                longest=max(lengths),
            )
        )
        rows = [(2, at) for at in range(4)] + [(0, 0)]
        rows += [(block, at) for block in (1, 2) for at in range(4)]
        for part, start, width in zip(found, (0, entries * widths[0]), widths, strict=True):
            wanted = [blocks[b, start + e * width : start + (e + 1) * width] for b, e in rows]
            assert torch.equal(part.cpu(), torch.stack(wanted))

    def test_one_stream_runs_in_order(self, device: Device) -> None:
        """A store right behind a load, with no event between, reads what the load brought."""
        layout = GEOMETRIES[0].layout()
        space = make_space(device, layout, num_blocks=64, num_slots=2)
        blocks = {"p0": tuple(reversed(range(64)))}
        _fill_records(space, [FIRST_SLOT])
        stream = device.new_stream("a")
        staging = Staging(device, space, stream)
        with self.holding(device, stream):
            plans = [
                (plan_pages(layout, "full", [FIRST_SLOT], blocks), Direction.LOAD),
                (plan_pages(layout, "full", [FIRST_SLOT + 1], blocks), Direction.STORE),
            ]
            staged = [staging.move_hybrid_indices([plan], way) for plan, way in plans]
            for each in staged:
                assert each is not None
                assert list(device.copy(each, stream))
        assert _passes(device, stream)
        first, second = space.regions["full"].data.chunk(2)
        assert torch.equal(first, second)

    def test_a_landing_names_a_layer_whose_bytes_are_there(self, device: Device) -> None:
        """Layers come in the order of the forward, each pool of each layer once."""
        layout = GEOMETRIES[6].layout()
        space = make_space(device, layout, num_blocks=4, num_slots=4)
        plan = plan_pages(layout, "full", [FIRST_SLOT], {"p0": (2,), "p1": (1,)})
        _fill_records(space, [FIRST_SLOT])
        stream = device.new_stream("a")
        staged = Staging(device, space, stream).move_hybrid_indices([plan], Direction.LOAD)
        assert staged is not None
        seen = []
        for landing in device.copy(staged, stream):
            assert all(event.synchronize(SECONDS) for event in landing.events)
            seen += [(landing.layer_id, pool) for pool in landing.pools]
        assert [layer_id for layer_id, _ in seen] == sorted(layer_id for layer_id, _ in seen)
        assert sorted(seen) == sorted((i, p.name) for p in layout.pools for i in p.layer_ids)


def _passes(device: Device, stream: Stream) -> bool:
    event = device.new_event()
    stream.record(event)
    return event.synchronize(SECONDS)


def _permuted_blocks(layout: RecordLayout, *, pages: int) -> dict[str, tuple[int, ...]]:
    dice = torch.Generator().manual_seed(7)
    return {
        pool.name: tuple(
            torch.randperm(4 * 64, generator=dice)[
                : pages * layout.blocks_per_page(pool.name)
            ].tolist()
        )
        for pool in layout.pools
    }


def _key(place: int) -> bytes:
    return place.to_bytes(4, "big")


def _fill_records(space: TransferSpace, slots: Sequence[int]) -> None:
    """Block k of page n of each pool gets the contents of key n * blocks_per_page + k."""
    for pool in space.layout.pools:
        per_page = space.layout.blocks_per_page(pool.name)
        for component, part in enumerate(pool.components):
            for layer_id in pool.layer_ids:
                rows = space.host_rows(pool.name, layer_id, component)
                for page, slot in enumerate(slots):
                    for at in range(per_page):
                        rows[slot - FIRST_SLOT, at] = poison.content(
                            _key(page * per_page + at),
                            pool.name,
                            layer_id,
                            component,
                            part.block_bytes,
                        )


def _check_device(space: TransferSpace, blocks: dict[str, tuple[int, ...]]) -> None:
    for name, memory in space.pools.items():
        poison.check({name: memory}, {b: _key(at) for at, b in enumerate(blocks[name])})
        others = sorted(set(range(memory.num_blocks)) - set(blocks[name]))
        for tensor in memory.components:
            rest = tensor[:, others]
            assert not rest.numel() or poison.is_poison(rest), f"{name}: a wrong block was written"


def _run(device: Device, space: TransferSpace, plan: TransferPlan, way: Direction) -> None:
    stream = device.new_stream(way.value)
    staging = Staging(device, space, stream)
    staged = staging.move_hybrid_indices([plan], way)
    assert staged is not None
    for _ in device.copy(staged, stream):
        pass
    assert _passes(device, stream)
    staging.retire(staged)
