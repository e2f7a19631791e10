"""The proof: a real sparse-attention model computes the same bits from restored state, and other
tokens as soon as the gate of one pool is taken away.

Each run that is ungated holds the copies of that pool alone, and shows that the other pool's had
landed: so it is this pool's gate, and no other, that makes the difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from owners import local_owner
from rayhicache.config import EngineSpec
from rayhicache.device.cpu import CpuDevice
from rayhicache.engines import models
from rayhicache.engines.tokenizer import encode
from rayhicache.engines.transformers_engine import TransformersEngine
from rayhicache.testing.faults import HoldingDevice, ungated
from runs import (
    LENGTH,
    NEW,
    PREFIX,
    SECONDS,
    Prompt,
    Reader,
    Run,
    just_enough,
    local_engine,
    prompt,
    require_sparse,
    run,
)

SEEDS = (0, 1, 2)
POOLS = ("kv", "index")


@contextmanager
def late(
    spec: EngineSpec, pool: str, mine: Prompt, other: Prompt
) -> Iterator[tuple[TransformersEngine, HoldingDevice, Run]]:
    """An engine whose copies of one pool are held, and the cold run of a prompt that it stored.

    Its device blocks hold the state of the other prompt.
    """
    assert spec.num_blocks == just_enough().num_blocks
    device = HoldingDevice(CpuDevice(wait_seconds=SECONDS), {pool})
    with local_owner(64 << 20) as owner, local_engine(spec, owner, device=device) as engine:
        try:
            cold = run(engine, mine)
            assert cold.generation.recomputed_tokens == LENGTH
            assert run(engine, other).generation.recomputed_tokens == LENGTH
            yield engine, device, cold
        finally:
            device.release()


def ungated_run(engine: TransformersEngine, pool: str, mine: Prompt) -> Run:
    """A run without one pool's gate, while its copies are held and the other's have landed."""
    with ungated(engine.pools, {pool}):
        garbled = run(engine, mine)
    (ticket,) = engine.pools.gate.open_tickets()
    for spec in engine.client.layout.pools:
        landed = {ticket.counter.landed(layer_id, spec.name) for layer_id in spec.layer_ids}
        assert landed == {spec.name != pool}
    assert garbled.generation.restored_local_tokens == PREFIX
    return garbled


def differing(garbled: Run, cold: Run) -> int:
    return sum(a != b for a, b in zip(garbled.tokens, cold.tokens, strict=True))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("seed", SEEDS)
def test_under_the_gate_a_late_pool_changes_no_bit(seed: int, pool: str) -> None:
    spec, mine = just_enough(seed=seed), prompt(seed)
    require_sparse(spec, PREFIX)
    with late(spec, pool, mine, prompt(seed + 100)) as (engine, device, cold):
        reader = Reader(device, lambda: run(engine, mine))
        assert reader.blocked.wait(SECONDS)
        device.release()
        warm = reader.value()
    assert warm.generation.restored_local_tokens == PREFIX
    assert sorted(warm.logits) == [PREFIX, *range(LENGTH, LENGTH + NEW - 1)]
    assert warm.computed_as(cold)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("seed", SEEDS)
def test_without_the_gate_of_one_pool_the_answer_is_garbled(seed: int, pool: str) -> None:
    spec, mine = just_enough(seed=seed), prompt(seed)
    require_sparse(spec, PREFIX)
    with late(spec, pool, mine, prompt(seed + 100)) as (engine, _, cold):
        garbled = ungated_run(engine, pool, mine)
    assert garbled.logits[PREFIX] != cold.logits[PREFIX]
    assert differing(garbled, cold) > NEW // 2


@pytest.mark.parametrize("pool", POOLS)
def test_with_the_tokenizers_vocabulary_and_real_text(pool: str) -> None:
    spec = EngineSpec(num_blocks=just_enough().num_blocks)
    mine = encode(inspect.getsource(inspect))[:LENGTH]
    other = encode(inspect.getsource(torch.nn.Module))[:LENGTH]
    require_sparse(spec, PREFIX)
    with late(spec, pool, mine, other) as (engine, device, cold):
        garbled = ungated_run(engine, pool, mine)
        (ticket,) = engine.pools.gate.open_tickets()
        device.release()
        assert ticket.result(SECONDS) is not None
        run(engine, other)
        warm = run(engine, mine)
    assert differing(garbled, cold) > NEW // 2
    assert warm.generation.restored_local_tokens == PREFIX
    assert warm.computed_as(cold)


def test_the_guard_refuses_an_index_that_chooses_every_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_model = models._BUILDERS["glm-dsa-tiny"][1]
    chooses_all = (lambda spec: models._glm_dsa(spec, index_topk=LENGTH + NEW), make_model)
    monkeypatch.setitem(models._BUILDERS, "glm-dsa-tiny", chooses_all)
    spec, mine = just_enough(), prompt(0)
    with pytest.raises(AssertionError, match="index_topk"):
        require_sparse(spec, PREFIX)
    # Why there is a guard: such a model doesn't see its index at all.
    with late(spec, "index", mine, prompt(100)) as (engine, _, cold):
        assert ungated_run(engine, "index", mine).computed_as(cold)
