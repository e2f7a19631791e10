"""Graphs read pools without a reader: they wait for whole tickets, and see poison otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from gpu.gpus import BLOCKS, LAYERS, PAGE, SECONDS, SLEEP_CYCLES, SleepyDevice, World
from owners import local_owner
from rayhicache.client import TierClient
from rayhicache.config import EngineSpec
from rayhicache.engines import models
from rayhicache.engines.attention import GROUPED
from rayhicache.engines.runner import ModelRunner
from rayhicache.engines.sequence import PagedBatch, Row
from rayhicache.errors import CaptureRefused
from rayhicache.memory.local import LocalPort
from rayhicache.requests import Load
from rayhicache.testing import poison

if TYPE_CHECKING:
    from transformers import PretrainedConfig

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LATE = frozenset({"kv", "index"})
# The copier's threads ask for their events meanwhile, which isn't theirs to know.
MODE = "thread_local"

Found = dict[tuple[str, int], torch.Tensor]


@pytest.fixture
def world() -> Iterator[World]:
    world = World(SleepyDevice())
    yield world
    world.close()


def read_all(world: World, at: torch.Tensor) -> Found:
    """Blocks of every pool and layer: `uint8[blocks, bytes]`, by kernels alone."""
    found = {}
    for layer_id in range(LAYERS):
        rows = world.pool.get_key_buffer(layer_id).view(BLOCKS, -1)
        found["kv", layer_id] = rows.index_select(0, at).view(torch.uint8)
        index = world.pool.get_index_k_with_scale_buffer(layer_id)
        found["index", layer_id] = index.index_select(0, at)
    return found


def captured(
    world: World, blocks: list[int], at: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, Found]:
    """A graph of these reads, and where a replay leaves what it read.

    Args:
        at: the blocks on the device, kept by the caller: a graph keeps the address alone.
    """
    graph = torch.cuda.CUDAGraph()
    with world.pools.reading(blocks):
        read_all(world, at)
        with torch.cuda.graph(graph, capture_error_mode=MODE):
            assert world.device.capturing()
            found = read_all(world, at)
    assert not world.device.capturing()
    return graph, found


def test_a_replay_after_wait_all_reads_what_a_late_load_brings(world: World) -> None:
    world.fill_records([1, 3])
    blocks = world.take(2)
    at = torch.tensor(blocks, device="cuda")
    graph, found = captured(world, blocks, at)
    world.device.sleepy = LATE
    ticket = world.load(blocks, [1, 3])
    ticket.wait_all()
    graph.replay()
    for (pool, layer_id), rows in found.items():
        for row, slot in zip(rows.cpu(), [1, 3], strict=True):
            assert torch.equal(row, world.expected(pool, layer_id, slot))


@pytest.mark.parametrize("pool", ["kv", "index"])
def test_a_replay_without_wait_all_reads_poison(world: World, pool: str) -> None:
    world.fill_records([1])
    blocks = world.take(1)
    at = torch.tensor(blocks, device="cuda")
    graph, found = captured(world, blocks, at)
    world.device.sleepy = frozenset({pool})
    ticket = world.load(blocks, [1])
    graph.replay()
    assert poison.is_poison(found[pool, LAYERS - 1].cpu())
    assert ticket.result(SECONDS)


def test_a_capture_is_refused_while_a_load_fills_what_it_reads(world: World) -> None:
    blocks, others = world.take(2), world.take(1)
    scratch = torch.zeros(1, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    world.device.sleepy, world.device.cycles = LATE, 20 * SLEEP_CYCLES
    ticket = world.load(blocks, [1, 3])
    # `torch.cuda.graph` would wait for the load before it begins.
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode=MODE)
        try:
            scratch.add_(1)
            with world.pools.reading(blocks), pytest.raises(CaptureRefused, match="wait_all"):
                world.pool.get_key_buffer(0)
            with world.pools.reading(others):
                world.pool.get_key_buffer(0)
        finally:
            graph.capture_end()
    # The refusal came before any wait, so the capture is whole.
    graph.replay()
    assert scratch.item() == 1
    assert ticket.result(SECONDS)


def small_llama(spec: EngineSpec) -> PretrainedConfig:
    config = models._llama(spec)
    config._attn_implementation = GROUPED  # makes no mask, so a forward copies nothing to the GPU
    return config


def test_a_captured_decode_reads_what_a_late_load_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole forward of a model as one graph: a restored prefix under one new token."""
    made = (small_llama, models._BUILDERS["llama-tiny"][1])
    monkeypatch.setitem(models._BUILDERS, "llama-tiny", made)
    spec = EngineSpec(model="llama-tiny", vocab_size=512, num_blocks=8, dtype="bfloat16")
    device = SleepyDevice()
    runner = ModelRunner(models.build_model(spec), device, num_blocks=8, block_tokens=PAGE)
    tokens = torch.randint(0, 512, (3 * PAGE + 1,)).tolist()
    blocks = runner.pools.allocate(4)
    assert blocks is not None
    with local_owner(64 << 20) as owner:
        client = TierClient(LocalPort(owner), runner.pools, models.identity_of(spec))
        prompt = client.prompt(tokens)
        for start in range(0, 3 * PAGE, PAGE):
            chunk = Row(blocks=blocks, tokens=tokens[start : start + PAGE], start=start)
            runner.forward([chunk], whole=False)
        row = Row(blocks=blocks, tokens=tokens[-1:], start=3 * PAGE)
        expected = runner.forward([row], whole=False).clone()
        assert client.store("s", prompt, blocks[:3], stop=3 * PAGE).result(SECONDS)

        batch = PagedBatch([row], PAGE, device.torch_device)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with runner.pools.reading(blocks, writes=blocks[3:]), torch.inference_mode():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                runner.forward_bound(batch, whole=False)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode=MODE):
                logits = runner.forward_bound(batch, whole=False)

        def replayed(*, waits: bool) -> torch.Tensor:
            poison.poison(runner.pools.memories(), blocks)
            torch.cuda.synchronize()
            found = client.lookup(prompt)
            assert found.tokens == 3 * PAGE
            ticket = client.load([Load(id="l", found=found, blocks=blocks[:3])])
            if waits:
                ticket.wait_all()
            graph.replay()
            answer = logits.clone()
            torch.cuda.synchronize()
            assert ticket.result(SECONDS)
            return answer

        device.sleepy = LATE
        assert torch.equal(replayed(waits=True), expected)
        assert not torch.equal(replayed(waits=False), expected)
        assert client.close(SECONDS)
    device.close()
