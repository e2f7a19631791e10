"""The Triton kernel moves what the host moves, of whatever shape, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from rayhicache.core.plan import plan_pages
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Device, Direction
from rayhicache.device.space import TransferSpace
from rayhicache.device.staging import StagedPlan, Staging
from rayhicache.testing.device_conformance import FIRST_SLOT, GEOMETRIES, Geometry, make_space

if TYPE_CHECKING:
    from rayhicache.device.cuda.device import CudaDevice
    from rayhicache.device.cuda.triton_copy import TritonCopy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECONDS = 60.0
BLOCKS, SLOTS, PAGES = 256, 6, 3


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    from rayhicache.device.cuda.device import CudaDevice

    device = CudaDevice()
    yield device
    device.close()


@pytest.fixture(scope="module")
def copy() -> TritonCopy:
    from rayhicache.device.cuda.triton_copy import triton_copy

    copy = triton_copy(0)
    if copy is None:
        pytest.skip("Triton isn't installed")
    return copy


def staged_on(device: Device, space: TransferSpace, way: Direction) -> StagedPlan:
    """Permuted pages, their indices where copies read them."""
    dice = torch.Generator().manual_seed(3)
    slots = [FIRST_SLOT + at for at in torch.randperm(SLOTS, generator=dice)[:PAGES].tolist()]
    blocks = {
        pool.name: torch.randperm(BLOCKS, generator=dice)[
            : PAGES * space.layout.blocks_per_page(pool.name)
        ].tolist()
        for pool in space.layout.pools
    }
    plan = plan_pages(space.layout, "full", slots, blocks)
    stream = device.new_stream(way.value)
    staged = Staging(device, space, stream).move_hybrid_indices([plan], way)
    assert staged is not None
    event = device.new_event()
    stream.record(event)
    assert event.synchronize(SECONDS)
    return staged


def move(device: CudaDevice, copy: TritonCopy, staged: StagedPlan) -> None:
    """Every pool, layer by layer, by the kernel; until each is there."""
    from rayhicache.device.cuda.driver import driver
    from rayhicache.device.cuda.geometry import geometry_of
    from rayhicache.device.cuda.movers import Moving
    from rayhicache.device.cuda.triton_copy import TritonMover
    from rayhicache.device.cuda.words import WordBoard

    board = WordBoard()
    for transfer in staged.transfers:
        place = geometry_of(staged.space, transfer.pool)
        if not place.sizes:
            continue
        assert copy.can_move(place.sizes, place.layers)
        moving = Moving(
            transfer=transfer,
            place=place,
            load=staged.direction is Direction.LOAD,
            start=0,
            stop=transfer.count,
            host_layers=tuple(
                torch.tensor(side.host_layers, device=device.torch_device) for side in place.sides
            ),
        )
        stream = torch.cuda.Stream()
        mover = TritonMover(copy, driver(), stream, board.new_word(), moving, blocks=8)
        assert mover.last() is None
        mover.begin()
        for position in range(place.layers):
            assert mover.enqueue(position).synchronize(SECONDS)
        stream.synchronize()


@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_the_kernel_moves_what_the_host_moves(
    device: CudaDevice, copy: TritonCopy, geometry: Geometry, way: Direction
) -> None:
    """And touches nothing else."""
    layout, host = geometry.layout(), CpuDevice()
    there = make_space(device, layout, num_blocks=BLOCKS, num_slots=SLOTS)
    here = make_space(host, layout, num_blocks=BLOCKS, num_slots=SLOTS)
    there.regions["full"].data.copy_(here.regions["full"].data.random_(0, 256))
    for name, memory in here.pools.items():
        for mine, theirs in zip(memory.components, there.pools[name].components, strict=True):
            theirs.copy_(mine.random_(0, 256))
    torch.cuda.synchronize()
    move(device, copy, staged_on(device, there, way))
    stream = host.new_stream("copy")
    for landing in host.copy(staged_on(host, here, way), stream):
        assert all(event.synchronize(SECONDS) for event in landing.events)
    assert torch.equal(there.regions["full"].data, here.regions["full"].data)
    for name, memory in here.pools.items():
        for mine, theirs in zip(memory.components, there.pools[name].components, strict=True):
            assert torch.equal(mine, theirs.cpu())
    host.close()
