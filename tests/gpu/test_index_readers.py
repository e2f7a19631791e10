"""Index entries gathered on a GPU are those that the host gathers, without a wait."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from rayhicache.core.layout import IndexFormat
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.gate import Gate
from rayhicache.device.paged import PagedGather, Section
from rayhicache.pools.base import PoolSet
from rayhicache.pools.index import IndexPool

if TYPE_CHECKING:
    from rayhicache.device.cuda.device import CudaDevice

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BLOCKS = 40
PADDING = (-1, 10**6, -(2**31), BLOCKS)


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    from rayhicache.device.cuda.device import CudaDevice

    device = CudaDevice()
    yield device
    device.close()


def ragged(
    entries: int,
    widths: tuple[int, int],
    lengths: list[int],
    dtype: torch.dtype,
    dice: random.Random,
) -> PagedGather:
    """A batch on the host, with blocks and padding drawn by chance."""
    columns = -(-max(lengths, default=0) // entries) + dice.randrange(3)
    tables = [
        [
            dice.randrange(BLOCKS) if at * entries < length else dice.choice(PADDING)
            for at in range(columns)
        ]
        for length in lengths
    ]
    bytes_of = torch.Generator().manual_seed(dice.randrange(2**31))
    return PagedGather(
        blocks=torch.randint(
            0, 256, (BLOCKS, entries * sum(widths)), dtype=torch.uint8, generator=bytes_of
        ),
        entries=entries,
        sections=(
            Section(offset=0, entry_bytes=widths[0]),
            Section(offset=entries * widths[0], entry_bytes=widths[1]),
        ),
        tables=torch.tensor(tables, dtype=dtype).view(len(lengths), columns),
        lengths=torch.tensor(lengths, dtype=dtype),
        total=sum(lengths),
        longest=max(lengths, default=0),
    )


def on(device: CudaDevice, gather: PagedGather) -> PagedGather:
    assert gather.lengths is not None
    return replace(
        gather,
        blocks=gather.blocks.to(device.torch_device),
        tables=gather.tables.to(device.torch_device),
        lengths=gather.lengths.to(device.torch_device),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("entries", [64, 16, 5, 1])
@pytest.mark.parametrize("widths", [(128, 4), (128, 0), (256, 0), (33, 4), (7, 1)], ids=str)
def test_a_gpu_gathers_what_the_host_gathers(
    device: CudaDevice, widths: tuple[int, int], entries: int, dtype: torch.dtype
) -> None:
    dice = random.Random(repr((widths, entries, dtype)))
    edges = [0, 1, entries - 1, entries, entries + 1, 8 * entries, 8 * entries + 1, 20 * entries]
    batches = [[], [0], [0, 0, 0], edges, *([dice.choice(edges) for _ in range(30)],) * 2]
    batches.append([dice.randrange(3 * entries) for _ in range(700)])
    for lengths in batches:
        gather = ragged(entries, widths, lengths, dtype, dice)
        wanted = CpuDevice().gather(gather)
        for found, want in zip(device.gather(on(device, gather)), wanted, strict=True):
            assert found.shape == want.shape
            assert torch.equal(found.cpu(), want)


def test_tables_may_be_a_part_of_wider_ones(device: CudaDevice) -> None:
    gather = ragged(16, (128, 4), [100, 3, 0, 77], torch.int32, random.Random(5))
    there = on(device, gather)
    wide = torch.full((4, there.tables.shape[1] + 9), -5, dtype=torch.int32, device="cuda")
    wide[:, : there.tables.shape[1]] = there.tables
    found = device.gather(replace(there, tables=wide[:, : there.tables.shape[1]]))
    for mine, want in zip(found, CpuDevice().gather(gather), strict=True):
        assert torch.equal(mine.cpu(), want)


def test_a_gather_does_not_wait_for_the_gpu_and_can_be_captured(device: CudaDevice) -> None:
    gather = ragged(64, (128, 4), [640, 0, 65], torch.int32, random.Random(6))
    there = on(device, gather)
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode itself is a prototype
            torch.cuda.set_sync_debug_mode("error")
        device.gather(there)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = device.gather(there)
    there.blocks.fill_(9)  # a replay reads what is there then
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((part == 9).all()) for part in found)


def test_readers_of_a_pool_on_a_gpu_gather_what_was_written(device: CudaDevice) -> None:
    gate, entries = Gate(), 64
    pool = IndexPool(
        device,
        gate,
        layer_ids=[3],
        num_blocks=BLOCKS,
        block_tokens=entries,
        entries=entries,
        index_format=IndexFormat(key_bytes=128, scale_bytes=4),
    )
    pools = PoolSet(device, gate, [pool])
    blocks, length = [7, 2, 39], 150
    at = torch.arange(length)
    loc = torch.tensor(blocks)[at // entries] * entries + at % entries
    keys = torch.randint(0, 256, (length, 128), dtype=torch.uint8)
    scales = torch.randint(0, 256, (length, 4), dtype=torch.uint8)
    with pools.reading((), writes=blocks):
        pool.set_index_k_scale_buffer(3, loc.cuda(), keys.cuda(), scales.cuda())
    pages = torch.tensor(blocks, dtype=torch.int32, device="cuda")
    with pools.reading(blocks):
        assert torch.equal(pool.get_index_k_continuous(3, length, pages).cpu(), keys)
        assert torch.equal(pool.get_index_k_scale_continuous(3, length, pages).cpu(), scales)
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        found = pool.get_index_k_scale_buffer(3, lengths, pages[None], length, length)
    assert torch.equal(found[0].cpu(), keys)
    assert torch.equal(found[1].cpu(), scales)
