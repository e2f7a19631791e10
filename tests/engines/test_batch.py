"""Several requests on one engine: who is computed when, and with which bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from owners import local_owner
from rayhicache.config import EngineSpec
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Direction
from rayhicache.engines.batch import BatchLimits
from rayhicache.engines.models import build_model
from rayhicache.engines.request import Request
from rayhicache.engines.runner import ModelRunner
from rayhicache.engines.sequence import PagedBatch, Row
from rayhicache.engines.transformers_engine import TransformersEngine
from rayhicache.errors import InvalidRequest, JobCancelled, QueueFull
from rayhicache.memory.owner import ArenaOwner
from rayhicache.testing.cold import EmptyPort
from rayhicache.testing.faults import FailingDevice, HoldingDevice
from runs import PAGE, SECONDS, VOCAB, Reader, Run, local_engine, prompt

NEW = 6
LENGTHS = (5 * PAGE + 10, 2 * PAGE + 50, PAGE + 1, 2 * PAGE + 30)
PAGES_STORED = (3, 2, 0, 1)
MODELS = ("glm-dsa-tiny", "llama-tiny")


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    with local_owner() as owner:
        yield owner


def spec_of(model: str = "llama-tiny", num_blocks: int = 32) -> EngineSpec:
    return EngineSpec(model=model, vocab_size=VOCAB, num_blocks=num_blocks)


def limits(**values: int) -> BatchLimits:
    return BatchLimits(**{"chunk_tokens": PAGE} | values)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [prompt(number, length) for number, length in enumerate(lengths)]


def answer(
    engine: TransformersEngine, tokens: Sequence[Sequence[int]], new: int = NEW
) -> list[Run]:
    """Answer together; the digests of all logits are kept, by request and first position."""
    logits: list[dict[int, str]] = [{} for _ in tokens]

    def asked(at: int) -> Request:
        def seen(start: int, values: torch.Tensor) -> None:
            logits[at][start] = hashlib.blake2b(values.contiguous().numpy().data).hexdigest()

        return Request(id=str(at), tokens=tokens[at], max_new_tokens=NEW, on_logits=seen)

    made = engine.generate_batch([asked(at) for at in range(len(tokens))])
    assert engine.settle(SECONDS)
    return [Run(generation=g, logits=seen) for g, seen in zip(made, logits, strict=True)]


def cold_answers(spec: EngineSpec, how: BatchLimits) -> list[Run]:
    """What the same batch answers over a tier that has nothing."""
    with local_owner() as owner:
        engine = TransformersEngine(spec, EmptyPort(owner), batch=how)
        found = answer(engine, prompts())
        assert engine.close(SECONDS)
    return found


def store_prefixes(engine: TransformersEngine) -> None:
    for tokens, pages in zip(prompts(), PAGES_STORED, strict=True):
        if pages:
            engine.generate("store", tokens[: pages * PAGE], 1)
    assert engine.settle(SECONDS)


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_different_hits_has_the_bits_of_the_cold_batch(
    owner: ArenaOwner, model: str
) -> None:
    spec = spec_of(model)
    cold = cold_answers(spec, limits())
    with local_engine(spec, owner, batch=limits()) as engine:
        store_prefixes(engine)
        warm = answer(engine, prompts())
    assert [w.generation.restored_local_tokens // PAGE for w in warm] == list(PAGES_STORED)
    assert all(w.computed_as(c) for w, c in zip(warm, cold, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_one_forward_over_restored_prefixes_of_different_lengths_has_the_bits_of_computed_ones(
    owner: ArenaOwner, model: str
) -> None:
    """The same rows in one rectangle: what lies before them computed in one run, loaded in the
    other, while every layer of every load comes late.
    """
    spec = spec_of(model)
    starts = [pages * PAGE for pages in PAGES_STORED]
    device = HoldingDevice(CpuDevice(wait_seconds=SECONDS), {"kv"})
    runner = ModelRunner(build_model(spec), CpuDevice(), num_blocks=32, block_tokens=PAGE)

    def rows(pools_of: ModelRunner) -> list[Row]:
        found = []
        for tokens, start in zip(prompts(), starts, strict=True):
            blocks = pools_of.pools.allocate(6)
            assert blocks is not None
            for at in range(0, start, PAGE):
                pools_of.forward(
                    [Row(blocks=blocks, tokens=tokens[at : at + PAGE], start=at)], whole=False
                )
            found.append(Row(blocks=blocks, tokens=tokens[start : start + PAGE], start=start))
        return found

    cold = runner.forward(rows(runner), whole=True)
    seen: dict[str, torch.Tensor] = {}

    def asked(at: int) -> Request:
        def keep(start: int, values: torch.Tensor) -> None:
            seen.setdefault(str(at), values.clone())

        return Request(id=str(at), tokens=prompts()[at], max_new_tokens=1, on_logits=keep)

    with local_engine(spec, owner, device=device, batch=limits(prefill_rows=4)) as engine:
        store_prefixes(engine)
        reader = Reader(device, lambda: engine.generate_batch([asked(at) for at in range(4)]))
        assert reader.blocked.wait(SECONDS)
        device.release()
        made = reader.value()
    assert [generation.restored_local_tokens for generation in made] == starts
    for at, row in enumerate(cold):
        width = min(LENGTHS[at] - starts[at], PAGE)
        assert torch.equal(seen[str(at)], row[-width:])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefill_rows", [1, 4])
def test_a_row_of_a_batch_answers_as_it_does_alone_but_for_rounding(
    owner: ArenaOwner, model: str, prefill_rows: int
) -> None:
    alone: dict[int, torch.Tensor] = {}
    together: dict[int, torch.Tensor] = {}

    def asked(at: int, into: dict[int, torch.Tensor]) -> Request:
        def keep(start: int, values: torch.Tensor) -> None:
            into[at] = values[-1].clone()

        return Request(id=str(at), tokens=prompts()[at], max_new_tokens=2, on_logits=keep)

    with local_engine(spec_of(model), owner, batch=limits(prefill_rows=prefill_rows)) as engine:
        for at in range(4):
            engine.generate_batch([asked(at, alone)])
        assert engine.settle(SECONDS)
        engine.generate_batch([asked(at, together) for at in range(4)])
    for at in range(4):
        torch.testing.assert_close(together[at], alone[at], rtol=1e-3, atol=1e-4)


def test_answers_go_on_while_a_new_requests_prefix_is_loaded(owner: ArenaOwner) -> None:
    device = HoldingDevice(CpuDevice(wait_seconds=SECONDS), {"kv"})
    with local_engine(spec_of(), owner, device=device, batch=limits()) as engine:
        store_prefixes(engine)
        with engine.batch() as batch:
            running = engine.submit(batch, Request(id="a", tokens=prompts()[2], max_new_tokens=NEW))
            while not running.answer:
                batch.step()
            late = engine.submit(batch, Request(id="b", tokens=prompts()[0], max_new_tokens=NEW))
            steps = 0
            while not running.done:
                batch.step()
                steps += 1
            # Each step was a token of the first: none waited for the second's load.
            assert steps == NEW - 1
            assert late.loading
            assert late.computed == late.restored == PAGES_STORED[0] * PAGE
            assert not late.answer
            device.release()
            while batch.step():
                pass
        assert engine.settle(SECONDS)
        assert running.result().tokens == engine.generate("again", prompts()[2], NEW).tokens
    assert len(late.result().tokens) == NEW
    assert late.result().restored_local_tokens == PAGES_STORED[0] * PAGE


def test_chunks_and_tokens_take_turns(owner: ArenaOwner) -> None:
    seen: list[str] = []

    def asked(name: str, tokens: list[int], new: int) -> Request:
        return Request(
            id=name, tokens=tokens, max_new_tokens=new, on_logits=lambda *_: seen.append(name)
        )

    with local_engine(spec_of(), owner, batch=limits()) as engine, engine.batch() as batch:
        first = engine.submit(batch, asked("a", prompt(1, PAGE), 5))
        while not first.answer:
            batch.step()
        engine.submit(batch, asked("b", prompt(2, 3 * PAGE), 1))
        while batch.step():
            pass
    assert seen == ["a", "a", "b", "a", "b", "a", "b", "a"]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_failed_load_is_recomputed_and_the_others_lose_nothing(
    owner: ArenaOwner, layer: int
) -> None:
    how = limits(prefill_rows=4)
    with local_engine(spec_of(), owner, batch=how) as engine:
        store_prefixes(engine)
    calls = iter(range(1000))
    # The first load fails, and no other.
    device = FailingDevice(
        CpuDevice(),
        lambda way, at: way is Direction.LOAD and at == layer and next(calls) == 0,
    )
    with local_engine(spec_of(), owner, device=device, batch=how) as engine:
        found = answer(engine, prompts())
    restored = [run.generation.restored_local_tokens // PAGE for run in found]
    assert restored == [0, *PAGES_STORED[1:]]
    with local_engine(spec_of(), owner, batch=how) as engine:
        again = answer(engine, prompts())
    assert [run.tokens for run in found] == [run.tokens for run in again]


def test_a_load_that_does_not_come_costs_its_own_request_alone(owner: ArenaOwner) -> None:
    cold = cold_answers(spec_of(), limits())
    device = HoldingDevice(CpuDevice(wait_seconds=0.05), {"kv"})
    with local_engine(spec_of(), owner, device=device, batch=limits()) as engine:
        engine.generate("store", prompts()[3], 1)
        assert engine.settle(SECONDS)
        found = answer(engine, prompts())
        assert [run.generation.restored_local_tokens for run in found] == [0, 0, 0, 0]
        assert all(run.computed_as(as_cold) for run, as_cold in zip(found, cold, strict=True))
        (ticket,) = engine.pools.gate.open_tickets()
        device.release()
        assert ticket.result(SECONDS) is not None


def test_requests_that_find_no_room_wait_for_the_others(owner: ArenaOwner) -> None:
    spec = spec_of(num_blocks=7)
    with local_engine(spec, owner, batch=limits()) as engine:
        alone = [engine.generate("x", tokens, NEW).tokens for tokens in prompts()]
        assert [run.tokens for run in answer(engine, prompts())] == alone
        with engine.batch() as batch:
            runs = [
                engine.submit(batch, Request(id="x", tokens=tokens, max_new_tokens=NEW))
                for tokens in prompts()
            ]
            while batch.step():
                pass
    assert [run.result().tokens for run in runs] == alone


def test_no_more_requests_run_than_are_allowed(owner: ArenaOwner) -> None:
    with local_engine(spec_of(), owner, batch=limits(rows_max=2)) as engine:
        with engine.batch() as batch:
            runs = [
                engine.submit(batch, Request(id="x", tokens=tokens, max_new_tokens=2))
                for tokens in prompts()
            ]
            while batch.step():
                assert sum(bool(run.blocks) for run in runs) <= 2
        assert all(len(run.result().tokens) == 2 for run in runs)


def test_a_cancelled_request_ends_alone(owner: ArenaOwner) -> None:
    asked = iter(range(100))
    requests = [
        Request(id="a", tokens=prompts()[0], max_new_tokens=NEW, cancelled=lambda: next(asked) > 6),
        Request(id="b", tokens=prompts()[1], max_new_tokens=NEW),
    ]
    with local_engine(spec_of(), owner, batch=limits()) as engine:
        with engine.batch() as batch:
            first, second = (engine.submit(batch, request) for request in requests)
            batch.run()
        assert len(second.result().tokens) == NEW
        assert len(first.answer) == 2
        with pytest.raises(JobCancelled):
            first.result()
        with pytest.raises(JobCancelled):
            engine.generate_batch(requests)


def test_what_is_not_done_at_the_end_of_a_batch_gives_all_back(owner: ArenaOwner) -> None:
    with local_engine(spec_of(), owner, batch=limits()) as engine:
        store_prefixes(engine)
        with engine.batch() as batch:
            for tokens in prompts():
                engine.submit(batch, Request(id="x", tokens=tokens, max_new_tokens=NEW))
            batch.step()
            assert engine.pools.allocator.num_free() < 32
        assert not batch.busy
        # `local_engine` asserts that every block is free and the owner that no lease is left.


def test_one_bad_request_of_a_batch_is_refused_before_any_is_computed(owner: ArenaOwner) -> None:
    told: list[int] = []
    requests = [
        Request(id="a", tokens=prompts()[0], max_new_tokens=NEW, on_token=told.append),
        Request(id="b", tokens=[VOCAB], max_new_tokens=NEW),
    ]
    with local_engine(spec_of(), owner) as engine, pytest.raises(InvalidRequest):
        engine.generate_batch(requests)
    assert not told


def test_blocks_that_never_come_end_one_request_and_the_batch_goes_on(owner: ArenaOwner) -> None:
    device = HoldingDevice(CpuDevice(wait_seconds=0.05), {"kv"})
    with local_engine(spec_of(num_blocks=6), owner, device=device, batch=limits()) as engine:
        store_prefixes(engine)
        with engine.batch() as batch:
            late = engine.submit(batch, Request(id="a", tokens=prompts()[0], max_new_tokens=2))
            short = engine.submit(batch, Request(id="b", tokens=prompt(9, 10), max_new_tokens=2))
            batch.run()
        with pytest.raises(QueueFull):
            late.result()
        assert len(short.result().tokens) == 2
        (ticket,) = engine.pools.gate.open_tickets()
        device.release()
        assert ticket.result(SECONDS) is not None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", [4 * PAGE, 5 * PAGE + 10])
def test_a_hit_is_cut_to_the_grid_of_chunks(owner: ArenaOwner, model: str, length: int) -> None:
    how = limits(chunk_tokens=2 * PAGE)
    tokens = prompt(1, length)
    with local_engine(spec_of(model), owner, batch=how) as engine:
        (cold,) = answer(engine, [tokens])
        (warm,) = answer(engine, [tokens])
    assert sorted(cold.logits)[:2] == [0, 2 * PAGE]
    assert warm.generation.restored_local_tokens == (length - 1) // (2 * PAGE) * 2 * PAGE
    assert warm.computed_as(cold)


def test_a_padded_row_reads_nothing_but_its_own() -> None:
    rows = [
        Row(blocks=[5, 2], tokens=[7, 8], start=2),
        Row(blocks=[4], tokens=[9], start=0),
    ]
    batch = PagedBatch(rows, 4, torch.device("cpu"))
    assert batch.tokens.tolist() == [[7, 8], [9, 9]]
    assert batch.positions.tolist() == [[2, 3], [0, 0]]
    assert batch.read.tolist() == [20, 21, 22, 23, 16, 16, 16, 16]
    assert batch.written.tolist() == [22, 23, 16]
    assert batch.fresh is not None
    assert batch.fresh.tolist() == [0, 1, 3]
    mask = batch.mask(torch.float32)
    assert mask is not None
    assert (mask == 0)[:, 0].tolist() == [
        [[True, True, True, False], [True, True, True, True]],
        [[True, False, False, False], [True, False, False, False]],
    ]


def test_rows_alike_need_no_mask() -> None:
    rows = [Row(blocks=[at], tokens=[1, 2], start=1) for at in range(3)]
    assert PagedBatch(rows, 4, torch.device("cpu")).mask(torch.float32) is None
