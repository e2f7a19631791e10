"""Real models on a GPU: restored equals cold, bit for bit, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from gpu.gpus import SLEEP_CYCLES, SleepyDevice
from owners import local_owner
from rayhicache.config import EngineSpec
from rayhicache.device.cuda.choice import CopyChoice
from rayhicache.engines.attention import grouped_attention
from rayhicache.engines.batch import BatchLimits
from rayhicache.engines.models import build_model
from rayhicache.engines.request import Request
from rayhicache.engines.runner import ModelRunner
from rayhicache.engines.sequence import Row
from rayhicache.engines.transformers_engine import TransformersEngine
from rayhicache.memory.local import LocalPort
from rayhicache.testing.cold import EmptyPort
from rayhicache.testing.faults import ungated

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECONDS = 60.0
NEW, PAGE, VOCAB, NUM_BLOCKS = 24, 64, 512, 40
LENGTHS = (512, 2 * PAGE + 20, PAGE + 1, 5 * PAGE + 30)
PAGES_STORED = (7, 2, 0, 3)
LATE = frozenset({"kv", "index"})

in_every_type = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
of_every_kind = pytest.mark.parametrize("model", ["glm-dsa-tiny", "llama-tiny"])


def tokens_of(seed: int, length: int = 512) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, VOCAB, (length,), generator=dice).tolist()
    return found


def spec_of(model: str, dtype: str, num_blocks: int = NUM_BLOCKS) -> EngineSpec:
    return EngineSpec(model=model, vocab_size=VOCAB, num_blocks=num_blocks, dtype=dtype)


def prompts() -> list[list[int]]:
    return [tokens_of(seed, length) for seed, length in enumerate(LENGTHS)]


class Seen:
    """The logits of every forward of every request, by first position."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def asked(self, at: int, tokens: Sequence[int], new: int = NEW) -> Request:
        def keep(start: int, values: torch.Tensor) -> None:
            self.logits[at, start] = values.clone()

        return Request(id=str(at), tokens=tokens, max_new_tokens=new, on_logits=keep)

    def computed_as(self, cold: Seen) -> bool:
        return all(torch.equal(mine, cold.logits[at]) for at, mine in self.logits.items())


@contextmanager
def engine_on(
    spec: EngineSpec,
    device: SleepyDevice,
    port: Callable[..., LocalPort] = LocalPort,
    *,
    prefill_rows: int = 1,
) -> Iterator[TransformersEngine]:
    how = BatchLimits(chunk_tokens=PAGE, prefill_rows=prefill_rows)
    with local_owner(64 << 20) as owner:
        engine = TransformersEngine(spec, port(owner), device=device, batch=how)
        try:
            yield engine
            assert engine.settle(SECONDS)
        finally:
            assert engine.close(SECONDS)
        assert engine.pools.allocator.num_free() == spec.num_blocks


def store_prefixes(engine: TransformersEngine) -> None:
    for tokens, pages in zip(prompts(), PAGES_STORED, strict=True):
        if pages:
            engine.generate("store", tokens[: pages * PAGE], 1)
    assert engine.settle(SECONDS)


@in_every_type
def test_a_restored_prefix_gives_the_bits_of_a_cold_run(dtype: str) -> None:
    # No more blocks than a run takes: each finds the state of the one before it.
    spec = spec_of("glm-dsa-tiny", dtype, num_blocks=9)
    # Rows by the copy engine, index pages by the kernel: one can come without the other.
    device = SleepyDevice(choice=CopyChoice(load=((8_192, 1.0),)))
    cold, warm = Seen(), Seen()
    with engine_on(spec, device) as engine:

        def run(seen: Seen, seed: int) -> tuple[int, tuple[int, ...]]:
            (made,) = engine.generate_batch([seen.asked(0, tokens_of(seed))])
            assert engine.settle(SECONDS)
            return made.restored_local_tokens, made.tokens

        restored, expected = run(cold, 1)
        assert restored == 0
        run(Seen(), 2)
        device.sleepy = LATE
        assert run(warm, 1) == (448, expected)
        assert warm.computed_as(cold)
        run(Seen(), 2)
        # Longer than the whole forward, which is slow beside so small a load.
        device.sleepy, device.cycles = frozenset({"index"}), 50 * SLEEP_CYCLES
        with ungated(engine.pools, {"index"}):
            assert run(Seen(), 1)[1] != expected


@of_every_kind
@in_every_type
def test_a_batch_of_different_hits_has_the_bits_of_the_cold_batch(model: str, dtype: str) -> None:
    spec, cold, warm = spec_of(model, dtype), Seen(), Seen()
    with engine_on(spec, SleepyDevice(), EmptyPort) as engine:
        expected = engine.generate_batch([cold.asked(at, p) for at, p in enumerate(prompts())])
    device = SleepyDevice()
    with engine_on(spec, device) as engine:
        store_prefixes(engine)
        device.sleepy = LATE
        made = engine.generate_batch([warm.asked(at, p) for at, p in enumerate(prompts())])
    assert [g.restored_local_tokens // PAGE for g in made] == list(PAGES_STORED)
    assert [g.tokens for g in made] == [g.tokens for g in expected]
    assert warm.computed_as(cold)


@of_every_kind
@in_every_type
def test_one_forward_over_restored_prefixes_has_the_bits_of_computed_ones(
    model: str, dtype: str
) -> None:
    """The same rows in one rectangle: what lies before them was computed, or comes late."""
    spec, starts = spec_of(model, dtype), [pages * PAGE for pages in PAGES_STORED]
    runner = ModelRunner(
        build_model(spec), SleepyDevice(), num_blocks=NUM_BLOCKS, block_tokens=PAGE
    )
    rows = []
    for tokens, start in zip(prompts(), starts, strict=True):
        blocks = runner.pools.allocate(9)
        assert blocks is not None
        for at in range(0, start, PAGE):
            before = Row(blocks=blocks, tokens=tokens[at : at + PAGE], start=at)
            runner.forward([before], whole=False)
        rows.append(Row(blocks=blocks, tokens=tokens[start : start + PAGE], start=start))
    cold = runner.forward(rows, whole=True)

    device, seen = SleepyDevice(), Seen()
    with engine_on(spec, device, prefill_rows=4) as engine:
        store_prefixes(engine)
        device.sleepy = LATE
        made = engine.generate_batch([seen.asked(at, p, 1) for at, p in enumerate(prompts())])
    assert [g.restored_local_tokens for g in made] == starts
    for at, row in enumerate(rows):
        assert torch.equal(seen.logits[at, row.start], cold[at, -len(row.tokens) :])


@of_every_kind
def test_answers_go_on_beside_a_slow_load(model: str) -> None:
    spec, device = spec_of(model, "bfloat16"), SleepyDevice()
    with engine_on(spec, device) as engine:
        store_prefixes(engine)
        device.sleepy, device.cycles = LATE, 50 * SLEEP_CYCLES  # half a second a layer
        with engine.batch() as batch:
            running = engine.submit(batch, Request(id="a", tokens=prompts()[2], max_new_tokens=NEW))
            while not running.answer:
                batch.step()
            late = engine.submit(batch, Request(id="b", tokens=prompts()[0], max_new_tokens=NEW))
            while not running.done:
                batch.step()
            assert late.loading
            assert not late.answer
            while batch.step():
                pass
        assert engine.settle(SECONDS)
        device.sleepy = frozenset()
        assert late.result().restored_local_tokens == PAGES_STORED[0] * PAGE
        for run, tokens in ((running, prompts()[2]), (late, prompts()[0])):
            assert run.result().tokens == engine.generate("again", tokens, NEW).tokens


@in_every_type
@pytest.mark.parametrize(("rows", "queries", "keys"), [(1, 1, 333), (3, 1, 333), (2, 128, 333)])
def test_grouped_attention_is_attention(rows: int, queries: int, keys: int, dtype: str) -> None:
    kind, width, scale = getattr(torch, dtype), 128, 128**-0.5
    dice = torch.Generator(device="cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice, device="cuda").to(kind)

    query = drawn(rows, 6, queries, width)
    key, value = (drawn(rows, keys, 2, width).transpose(1, 2) for _ in range(2))
    hidden = torch.arange(keys)[None, :] > torch.arange(keys - queries, keys)[:, None]
    mask = torch.zeros(rows, 1, queries, keys, dtype=kind).masked_fill(
        hidden, torch.finfo(kind).min
    )
    mask = mask.cuda()
    wide = [part.double().repeat_interleave(3, dim=1) for part in (key, value)]
    scores = query.double() @ wide[0].transpose(2, 3) * scale + mask.double()
    expected = (scores.softmax(dim=-1) @ wide[1]).transpose(1, 2)
    near = 2e-3 if kind is torch.float32 else 2e-2
    for given in (None, mask):
        found, _ = grouped_attention(torch.nn.Module(), query, key, value, given, scale)
        torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
