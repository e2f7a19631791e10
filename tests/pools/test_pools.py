"""What pools hold, in which shapes, and that index readers gather what a plain loop gathers."""

from __future__ import annotations

import itertools

import pytest
import torch

from device.worlds import BLOCK, NUM_BLOCKS, SECONDS, Make, World, index, mha, mla, nsa
from rayhicache.core.layout import HitPolicy, IndexFormat, PoolSpec
from rayhicache.core.slots import divide_regions
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.gate import Gate
from rayhicache.device.protocols import Device
from rayhicache.device.space import HostRegion, TransferSpace
from rayhicache.errors import InvalidLayout, InvalidRequest, UnboundRead, UnknownLayer, UnknownPool
from rayhicache.pools.base import Component, DevicePool, PoolSet
from rayhicache.pools.index import IndexPool
from rayhicache.testing import poison


def draft(device: Device, gate: Gate) -> DevicePool:
    """A draft model's pool, with tensors of several dtypes and shapes (R5, R9)."""
    return DevicePool(
        device,
        gate,
        name="draft",
        layer_ids=[5],
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK,
        components=[
            Component(name="state", shape=(3, 5), dtype=torch.float32),
            Component(name="conv", shape=(7,), dtype=torch.bfloat16),
            Component(name="none", shape=(0,), dtype=torch.bfloat16),
            Component(name="flags", shape=(3,), dtype=torch.uint8),
        ],
    )


MAKES: dict[str, Make] = {"kv": mla, "index": index, "draft": draft}
SUBSETS = [c for n in (1, 2, 3) for c in itertools.combinations(MAKES, n)]


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_any_subset_of_pools_comes_back_whole(names: tuple[str, ...]) -> None:
    """R6: store, poison the device, load into other blocks, compare every byte."""
    world = World(*(MAKES[name] for name in names))
    mine, others = world.take(8), world.take(8)
    world.fill_blocks(mine, [4, 1])
    stored = world.store(mine, [2, 5]).result(SECONDS)
    assert stored is not None
    assert stored.done
    poison.poison(world.memories)
    loaded = world.load(others, [2, 5]).result(SECONDS)
    assert loaded is not None
    assert loaded.done
    world.expect(others, [4, 1])
    world.close()


@pytest.mark.parametrize("missing", ["kv", "index"])
@pytest.mark.parametrize("side", ["device", "host"])
def test_a_declared_pool_without_one_side_refuses_to_start(side: str, missing: str) -> None:
    world = World(nsa)
    pools = dict(world.memories)
    layout = world.layout
    if side == "device":
        del pools[missing]
    else:
        kept = [
            pool for pool in (mla, index) if pool.__name__ != {"kv": "mla"}.get(missing, missing)
        ]
        layout = PoolSet(
            world.device, world.gate, [make(world.device, world.gate) for make in kept]
        ).layout(64)
    with pytest.raises(InvalidLayout, match=missing):
        TransferSpace(layout, pools, world.space.regions)
    world.close()


def test_a_group_without_a_region_refuses_to_start() -> None:
    world = World(nsa)
    with pytest.raises(InvalidLayout, match="full"):
        TransferSpace(world.layout, world.memories, {})
    world.close()


def test_widths_are_the_tensors_own() -> None:
    """R20: 656 bytes of packed fp8 rows, whatever a model's config says."""
    world = World(lambda d, g: mla(d, g, latent_dim=512, row_dim=656, dtype=torch.uint8))
    assert world.pools.pool("kv").spec.block_bytes == BLOCK * 656
    (part,) = world.memories["kv"].components
    assert part.shape == (4, NUM_BLOCKS, BLOCK * 656)
    assert world.layout.shape().nbytes == 4 * 64 * 656
    world.close()


def test_layers_lie_a_constant_stride_apart() -> None:
    world = World(nsa)
    for memory in world.memories.values():
        for tensor in memory.components:
            assert tensor.is_contiguous()
    world.close()


def test_shapes_are_what_engines_expect() -> None:
    world = World(mha)
    with world.pools.reading([]):
        keys, values = world.pool.get_kv_buffer(0)
    assert keys.shape == (NUM_BLOCKS * BLOCK, 2, 4)
    assert values.shape == (NUM_BLOCKS * BLOCK, 2, 6)
    assert keys.dtype is torch.bfloat16
    world.close()


def test_values_of_no_width_are_legal() -> None:
    world = World(lambda d, g: mha(d, g, value_dim=0))
    mine, others = world.take(4), world.take(4)
    loc = torch.arange(4 * BLOCK)
    with world.pools.reading(mine, writes=mine):
        world.pool.set_kv_buffer(
            1, loc, torch.ones(64, 2, 4).bfloat16(), torch.ones(64, 2, 0).bfloat16()
        )
    assert world.store(mine, [0]).result(SECONDS)
    world.load(others, [0])
    with world.pools.reading(others):
        keys, values = world.pool.get_kv_buffer(1)
        assert values.shape == (NUM_BLOCKS * BLOCK, 2, 0)
        assert (keys.view(NUM_BLOCKS, -1)[others] == 1).all()
    world.close()


def test_an_unknown_layer_or_pool_is_named() -> None:
    world = World(nsa)
    with world.pools.reading([]), pytest.raises(UnknownLayer, match="layer 1 of pool 'index'"):
        world.pool.get_index_k_with_scale_buffer(1)
    with pytest.raises(UnknownPool, match="draft"):
        world.pools.pool("draft")
    world.close()


def test_pools_of_one_table_have_the_same_blocks() -> None:
    device, gate = CpuDevice(), Gate()
    with pytest.raises(InvalidLayout):
        PoolSet(device, gate, [mla(device, gate), index(device, gate, num_blocks=8)])
    with pytest.raises(InvalidLayout):
        PoolSet(device, gate, [mla(device, gate), mha(device, gate)])
    device.close()


def test_the_layout_is_made_of_the_pools() -> None:
    world = World(nsa)
    assert [spec.name for spec in world.layout.pools] == ["kv", "index"]
    assert world.layout.group("full").policy is HitPolicy.ALL_PAGES
    assert all(isinstance(spec, PoolSpec) for spec in world.layout.pools)
    assert divide_regions(world.layout, data_offset=0, data_bytes=1 << 20)
    assert isinstance(world.space.regions["full"], HostRegion)
    world.close()


def test_an_unbound_read_and_an_unbound_write_raise() -> None:
    world = World(mla)
    pool = world.pools.pool("kv")
    rows = torch.ones(1, 1, 8), torch.ones(1, 1, 4)
    with pytest.raises(UnboundRead):
        pool.layer(0)
    with pytest.raises(UnboundRead):
        world.pool.set_kv_buffer(0, torch.tensor([0]), *rows)
    with world.pools.reading([0]), pytest.raises(UnboundRead, match="reading only"):
        world.pool.set_kv_buffer(0, torch.tensor([0]), *rows)
    with world.pools.reading([0], writes=[0]):
        world.pool.set_kv_buffer(0, torch.tensor([0]), *rows)
    world.close()


# ── index readers against a plain loop ──────────────────────────────────────────────────────

ENTRIES, KEY, SCALE = 4, 6, 3


def index_world(scale_bytes: int) -> tuple[World, IndexPool, dict[int, tuple[bytes, bytes]]]:
    """An index pool whose every entry is its own, written through the writer."""
    world = World(
        lambda d, g: index(
            d, g, entries=ENTRIES, index_format=IndexFormat(key_bytes=KEY, scale_bytes=scale_bytes)
        )
    )
    pool = world.pool
    assert isinstance(pool, IndexPool)
    slots = torch.randperm(NUM_BLOCKS * ENTRIES, generator=torch.Generator().manual_seed(5))
    entries = {
        slot: (
            bytes(poison.content(b"k%d" % slot, "index", 2, 0, KEY).tolist()),
            bytes(poison.content(b"s%d" % slot, "index", 2, 0, scale_bytes).tolist()),
        )
        for slot in slots.tolist()
    }
    blocks = range(NUM_BLOCKS)
    with world.pools.reading(blocks, writes=blocks):
        pool.set_index_k_scale_buffer(
            2,
            slots,
            torch.tensor([list(key) for key, _ in entries.values()], dtype=torch.uint8),
            torch.tensor([list(scale) for _, scale in entries.values()], dtype=torch.uint8).view(
                len(entries), scale_bytes
            ),
        )
    return world, pool, entries


def naive(
    entries: dict[int, tuple[bytes, bytes]], blocks: list[int], seq_len: int
) -> tuple[list[bytes], list[bytes]]:
    found = [entries[blocks[at // ENTRIES] * ENTRIES + at % ENTRIES] for at in range(seq_len)]
    return [key for key, _ in found], [scale for _, scale in found]


def rows_of(tensor: torch.Tensor) -> list[bytes]:
    return [bytes(row) for row in tensor.tolist()]


@pytest.mark.parametrize("scale_bytes", [SCALE, 0])
@pytest.mark.parametrize("seq_len", [0, 1, 3, 4, 5, 8, 11, 12])
def test_continuous_readers_gather_one_sequence(seq_len: int, scale_bytes: int) -> None:
    world, pool, entries = index_world(scale_bytes)
    blocks = [7, 2, 19]
    keys, scales = naive(entries, blocks, seq_len)
    with world.pools.reading(blocks):
        pages = torch.tensor(blocks, dtype=torch.int32)
        assert rows_of(pool.get_index_k_continuous(2, seq_len, pages)) == keys
        found = pool.get_index_k_scale_continuous(2, seq_len, pages)
    assert found.shape == (seq_len, scale_bytes)
    assert rows_of(found) == scales
    world.close()


@pytest.mark.parametrize("scale_bytes", [SCALE, 0])
@pytest.mark.parametrize("lengths", [[], [0], [1], [5], [12, 1, 0, 7], [4, 8], [3, 3, 3]], ids=str)
@pytest.mark.parametrize("padding", [0, -1, 10**6])
def test_the_ragged_reader_gathers_a_batch(
    lengths: list[int], scale_bytes: int, padding: int
) -> None:
    world, pool, entries = index_world(scale_bytes)
    tables = [[7, 2, 19], [2, 7, 0], [1, 1, 1], [23, 22, 21]][: len(lengths)]
    padded = [
        [block if at * ENTRIES < length else padding for at, block in enumerate(table)]
        for table, length in zip(tables, lengths, strict=True)
    ]
    keys: list[bytes] = []
    scales: list[bytes] = []
    for table, length in zip(tables, lengths, strict=True):
        more = naive(entries, table, length)
        keys += more[0]
        scales += more[1]
    with world.pools.reading(range(NUM_BLOCKS)):
        found = pool.get_index_k_scale_buffer(
            2,
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(padded, dtype=torch.int32).view(len(lengths), 3),
            sum(lengths),
            max(lengths, default=0),
        )
    assert found[0].shape == (sum(lengths), KEY)
    assert found[1].shape == (sum(lengths), scale_bytes)
    assert (rows_of(found[0]), rows_of(found[1])) == (keys, scales)
    world.close()


def test_a_reader_refuses_what_its_tables_cannot_hold() -> None:
    world, pool, _ = index_world(SCALE)
    pages = torch.tensor([7, 2], dtype=torch.int32)
    lengths = torch.tensor([2 * ENTRIES + 1])
    with world.pools.reading([7, 2]):
        with pytest.raises(InvalidRequest):
            pool.get_index_k_continuous(2, 2 * ENTRIES + 1, pages)
        with pytest.raises(InvalidRequest):
            pool.get_index_k_scale_buffer(2, lengths, pages[None], int(lengths), int(lengths))
    world.close()


@pytest.mark.parametrize("strange", [-1, NUM_BLOCKS])
def test_a_block_within_a_sequence_that_is_none_of_the_pool_is_refused(strange: int) -> None:
    world, pool, _ = index_world(SCALE)
    pages = torch.tensor([7, strange], dtype=torch.int32)
    with world.pools.reading([7]), pytest.raises(InvalidRequest):
        pool.get_index_k_continuous(2, ENTRIES + 1, pages)
    world.close()


def test_an_index_block_is_all_keys_then_all_scales() -> None:
    world, pool, entries = index_world(SCALE)
    with world.pools.reading([3]):
        block = bytes(pool.get_index_k_with_scale_buffer(2)[3].tolist())
    mine = [entries[3 * ENTRIES + at] for at in range(ENTRIES)]
    assert block == b"".join(key for key, _ in mine) + b"".join(scale for _, scale in mine)
    world.close()
