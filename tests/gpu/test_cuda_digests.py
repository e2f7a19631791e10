"""Digests made on a GPU are the host's, of whatever shape, and are those of the records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.plan import TransferPlan, plan_pages
from rayhicache.core.slots import SlotRef
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Device, Direction
from rayhicache.device.space import TransferSpace
from rayhicache.device.staging import Staging
from rayhicache.memory.digest import placed_sums, record_digests
from rayhicache.testing.device_conformance import FIRST_SLOT, GEOMETRIES, Geometry, make_space

if TYPE_CHECKING:
    from rayhicache.device.cuda.device import CudaDevice

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECONDS = 60.0
BLOCKS, SLOTS = 640, 20


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    from rayhicache.device.cuda.device import CudaDevice

    device = CudaDevice()
    yield device
    device.close()


def permuted(layout: RecordLayout, pages: int) -> TransferPlan:
    dice = torch.Generator().manual_seed(pages)
    slots = [FIRST_SLOT + at for at in torch.randperm(SLOTS, generator=dice)[:pages].tolist()]
    blocks = {
        pool.name: torch.randperm(BLOCKS, generator=dice)[
            : pages * layout.blocks_per_page(pool.name)
        ].tolist()
        for pool in layout.pools
    }
    return plan_pages(layout, "full", slots, blocks)


def sums_of(device: Device, space: TransferSpace, plan: TransferPlan) -> torch.Tensor:
    stream = device.new_stream("digests")
    staged = Staging(device, space, stream).move_hybrid_indices([plan], Direction.STORE)
    assert staged is not None
    digests = device.digests(staged, stream)
    assert digests.event.synchronize(SECONDS)
    return digests.sums["full"].clone()


@pytest.mark.parametrize("way", ["kernel", "torch"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_a_gpus_digests_are_the_hosts(
    device: CudaDevice, geometry: Geometry, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device._digester._kernel is not None
    if way == "torch":
        monkeypatch.setattr(device._digester, "_kernel", None)
    layout, host = geometry.layout(), CpuDevice()
    there = make_space(device, layout, num_blocks=BLOCKS, num_slots=SLOTS)
    here = make_space(host, layout, num_blocks=BLOCKS, num_slots=SLOTS)
    for name, memory in here.pools.items():
        for mine, theirs in zip(memory.components, there.pools[name].components, strict=True):
            theirs.copy_(mine.random_(0, 256))
    torch.cuda.synchronize()
    most = min(SLOTS, *(BLOCKS // layout.blocks_per_page(pool.name) for pool in layout.pools))
    for pages in {1, 3, min(9, most), most}:
        plan = permuted(layout, pages)
        assert torch.equal(sums_of(device, there, plan), sums_of(host, here, plan))
    host.close()


def test_a_stores_digests_are_those_of_the_records_that_it_made(device: CudaDevice) -> None:
    """Also where the forward before it has yet to write the blocks when it is started."""
    from gpu.gpus import SleepyDevice, World

    world = World(SleepyDevice())
    slots = [5, 0, 3, 6]
    blocks = world.take(len(slots))
    torch.cuda._sleep(100_000_000)
    for memory in world.memories.values():
        for tensor in memory.components:
            tensor.random_(0, 256)
    ticket = world.store(blocks, slots)
    outcome = ticket.result(SECONDS)
    assert outcome is not None
    assert outcome.done
    refs = [SlotRef(slot, 1) for slot in slots]
    keys = [PageKey(bytes([slot]) * 16) for slot in slots]
    host = world.space.regions["full"]
    wanted = record_digests(world.layout, host.region, host.data, refs, keys)
    assert placed_sums(world.layout, ticket.sums["full"].tolist(), refs, keys) == wanted
    world.pools.free(blocks)
    world.close()
