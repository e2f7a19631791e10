from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from owners import local_owner, mortal_owner
from rayhicache.config import EngineSpec
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.staging import StagedPlan
from rayhicache.errors import (
    InvalidConfig,
    InvalidRequest,
    JobCancelled,
    PromptTooLong,
    QueueFull,
    UnknownModel,
)
from rayhicache.memory.owner import ArenaOwner
from rayhicache.testing.faults import (
    BreakingDevice,
    DeviceDecorator,
    FailingDevice,
    HoldingDevice,
)
from runs import (
    PAGE,
    SECONDS,
    VOCAB,
    Reader,
    just_enough,
    local_engine,
    prompt,
    run,
)

SHORT = 3 * PAGE + 10
SMALL = EngineSpec(vocab_size=VOCAB, num_blocks=16)


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    with local_owner() as owner:
        yield owner


@pytest.mark.parametrize("model", ["glm-dsa-tiny", "llama-tiny", "glm-dsa-small"])
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, SHORT])
def test_a_restored_run_has_the_bits_of_a_cold_one(
    owner: ArenaOwner, model: str, length: int
) -> None:
    spec = EngineSpec(model=model, vocab_size=VOCAB, num_blocks=8)
    with local_engine(spec, owner) as engine:
        cold = run(engine, prompt(1, length))
        run(engine, prompt(2, SHORT))
        warm = run(engine, prompt(1, length))
    assert warm.computed_as(cold)
    # The hit is cut to the grid and to the prompt's length minus one.
    assert warm.generation.restored_local_tokens == (length - 1) // PAGE * PAGE


def test_pages_that_decoding_made_are_not_stored(owner: ArenaOwner) -> None:
    with local_engine(SMALL, owner) as engine:
        answer = run(engine, prompt(1, PAGE + 10), PAGE + 10).tokens
        assert owner.stats().ready == 1
        # The next turn prefills the answer, and that is what is stored.
        turn = [*prompt(1, PAGE + 10), *answer]
        assert run(engine, turn).generation.restored_local_tokens == PAGE
        assert owner.stats().ready == 2
        assert run(engine, turn).generation.restored_local_tokens == 2 * PAGE


def test_two_models_share_no_page(owner: ArenaOwner) -> None:
    for seed in (0, 1):
        with local_engine(EngineSpec(vocab_size=VOCAB, num_blocks=8, seed=seed), owner) as engine:
            assert run(engine, prompt(1, SHORT)).generation.restored_local_tokens == 0


@pytest.mark.parametrize("layer", [0, 3, 5])
@pytest.mark.parametrize(
    "fault", [lambda layer: failing(layer), lambda layer: BreakingDevice(CpuDevice(), layer)]
)
def test_a_failed_load_costs_a_recompute_and_is_never_met_again(
    owner: ArenaOwner, fault: Callable[[int], DeviceDecorator], layer: int
) -> None:
    with local_engine(just_enough(), owner) as engine:
        cold = run(engine, prompt(1, SHORT))
    with local_engine(just_enough(), owner, device=fault(layer)) as engine:
        run(engine, prompt(2, SHORT))  # leaves its state in the blocks
        recomputed = run(engine, prompt(1, SHORT))
        assert recomputed.generation.restored_local_tokens == 0
        assert recomputed.generation.recomputed_tokens == SHORT
        assert recomputed.computed_as(cold)
        assert recomputed.logits.keys() == cold.logits.keys()
    # The bad records were forgotten, and those of the recompute took their place.
    with local_engine(just_enough(), owner) as engine:
        warm = run(engine, prompt(1, SHORT))
    assert warm.generation.restored_local_tokens == 3 * PAGE
    assert warm.computed_as(cold)


def failing(layer: int) -> FailingDevice:
    return FailingDevice.at(CpuDevice(), Direction.LOAD, layer)


def test_a_load_that_does_not_come_is_recomputed_into_fresh_blocks(owner: ArenaOwner) -> None:
    device = HoldingDevice(CpuDevice(wait_seconds=0.05), {"index"})
    with local_engine(SMALL, owner, device=device) as engine:
        cold = run(engine, prompt(1, SHORT))
        late = run(engine, prompt(1, SHORT))
        assert late.computed_as(cold)
        assert late.generation.restored_local_tokens == 0
        # The first blocks belong to the load until its last copy has passed.
        (ticket,) = engine.pools.gate.open_tickets()
        assert engine.pools.allocator.num_free() == SMALL.num_blocks - 3
        device.release()
        assert ticket.result(SECONDS) is not None
        assert engine.pools.allocator.num_free() == SMALL.num_blocks


def test_blocks_that_never_come_free_end_the_request_with_a_typed_error(owner: ArenaOwner) -> None:
    device = HoldingDevice(CpuDevice(wait_seconds=0.05), {"kv"})
    limits = CopyLimits(copy_seconds=SECONDS)
    with local_engine(just_enough(), owner, device=device, limits=limits) as engine:
        run(engine, prompt(1))
        with pytest.raises(QueueFull, match="device blocks"):
            run(engine, prompt(1))
        (ticket,) = engine.pools.gate.open_tickets()
        device.release()
        assert ticket.result(SECONDS) is not None
        assert engine.pools.allocator.num_free() == just_enough().num_blocks


@pytest.mark.parametrize("stage", range(6))
def test_a_cancelled_request_gives_everything_back_at_every_stage(
    owner: ArenaOwner, stage: int
) -> None:
    """R16. Two chunks are prefilled and four tokens decoded, with a load before them."""
    with local_engine(SMALL, owner) as engine:
        run(engine, prompt(1, 2 * PAGE))
        asked = iter(range(100))
        with pytest.raises(JobCancelled):
            run(
                engine,
                [*prompt(1, 2 * PAGE), *prompt(2, 80)],
                cancelled=lambda: next(asked) == stage,
            )
        assert next(asked) == stage + 1
        assert engine.settle(SECONDS)
        assert run(engine, prompt(1, SHORT)).generation.prompt_tokens == SHORT
        assert owner.stats().leases == 0


class StartedDevice(HoldingDevice):
    """Tells when the first layer of a load has been enqueued."""

    def __init__(self) -> None:
        super().__init__(CpuDevice(wait_seconds=SECONDS), {"kv"})
        self.started = threading.Event()

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        for landing in super().copy(staged, stream):
            if staged.direction is Direction.LOAD:
                self.started.set()
            yield landing


def test_a_cancelled_request_leaves_its_blocks_to_the_running_load(owner: ArenaOwner) -> None:
    device = StartedDevice()
    with local_engine(SMALL, owner, device=device) as engine:
        run(engine, prompt(1, SHORT))
        with pytest.raises(JobCancelled):
            # A load that is cancelled before it has begun copies nothing and holds nothing.
            run(engine, prompt(1, SHORT), cancelled=lambda: device.started.wait(SECONDS))
        assert engine.pools.allocator.num_free() == SMALL.num_blocks - 3
        assert owner.stats().leases == 1
        (ticket,) = engine.pools.gate.open_tickets()
        device.release()
        assert ticket.result(SECONDS) is not None
        assert owner.stats().leases == 0


class Unwelcome(RuntimeError):
    """What a caller's own function raises."""


def test_a_callers_error_gives_everything_back(owner: ArenaOwner) -> None:
    def refuse(token: int) -> None:
        raise Unwelcome(token)

    with local_engine(SMALL, owner) as engine, pytest.raises(Unwelcome):
        engine.generate("r", prompt(1, SHORT), 4, on_token=refuse)


def test_tokens_are_told_as_they_are_chosen(owner: ArenaOwner) -> None:
    told: list[int] = []
    with local_engine(SMALL, owner) as engine:
        answer = engine.generate("r", prompt(1, 5), 4, on_token=told.append)
    assert tuple(told) == answer.tokens
    assert answer.ttft_seconds > 0


@pytest.mark.parametrize(
    ("tokens", "new", "error"),
    [
        ([], 4, InvalidRequest),
        ([1], 0, InvalidRequest),
        ([1, VOCAB], 4, InvalidRequest),
        ([1, -1], 4, InvalidRequest),
        ([1] * (16 * PAGE), 2, PromptTooLong),
        ([1] * 1000, 1000, PromptTooLong),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_changes(
    owner: ArenaOwner, tokens: list[int], new: int, error: type[Exception]
) -> None:
    with local_engine(SMALL, owner) as engine:
        before = owner.stats()
        with pytest.raises(error):
            engine.generate("r", tokens, new)
        assert owner.stats() == before
        assert engine.pools.allocator.num_free() == SMALL.num_blocks


def test_the_models_own_limit_counts_the_answer(owner: ArenaOwner) -> None:
    spec = EngineSpec(vocab_size=VOCAB, num_blocks=8, max_positions=PAGE)
    with local_engine(spec, owner) as engine:
        assert len(run(engine, prompt(1, PAGE - 4), 4).tokens) == 4
        with pytest.raises(PromptTooLong, match=f"model takes {PAGE} tokens"):
            run(engine, prompt(1, PAGE - 4), 5)


def test_an_owner_that_is_gone_costs_a_recompute() -> None:
    with mortal_owner() as owner, local_engine(SMALL, owner) as engine:
        cold = run(engine, prompt(1, SHORT))
        owner.close(unlink=True)
        warm = run(engine, prompt(1, SHORT))
        assert warm.generation.restored_local_tokens == 0
        assert warm.computed_as(cold)


def test_a_waiting_reader_does_not_keep_others_from_the_owner(owner: ArenaOwner) -> None:
    device = HoldingDevice(CpuDevice(wait_seconds=SECONDS), {"index"})
    with local_engine(SMALL, owner, device=device) as engine:
        run(engine, prompt(1, SHORT))
        reader = Reader(device, lambda: run(engine, prompt(1, SHORT)))
        assert reader.blocked.wait(SECONDS)
        with local_engine(SMALL, owner) as other:
            assert run(other, prompt(1, SHORT)).generation.restored_local_tokens == 3 * PAGE
        device.release()
        assert reader.value().generation.restored_local_tokens == 3 * PAGE


def test_close_is_idempotent_and_ends_its_threads(owner: ArenaOwner) -> None:
    before = set(threading.enumerate())
    with local_engine(SMALL, owner) as engine:
        assert set(threading.enumerate()) - before
        assert engine.close()
        assert engine.close()
    assert not {thread for thread in threading.enumerate() if thread.is_alive()} - before


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"model": "gpt-17"}, UnknownModel, "glm-dsa-tiny"),
        ({"dtype": "int3"}, InvalidConfig, "float32"),
        ({"num_blocks": 0}, InvalidConfig, "num_blocks"),
        ({"seed": -1}, InvalidConfig, "seed"),
        ({"max_positions": 1}, InvalidConfig, "max_positions"),
        ({"vocab_size": 1}, InvalidConfig, "vocab_size"),
    ],
)
def test_a_spec_that_cannot_be_made_says_what_can(
    wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        EngineSpec(**wrong)
