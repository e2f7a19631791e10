"""A real sparse-attention model on a GPU: restored equals cold, bit for bit."""

from __future__ import annotations

import pytest
import torch

from gpu.gpus import SLEEP_CYCLES, SleepyDevice
from owners import local_owner
from rayhicache.config import EngineSpec
from rayhicache.device.cuda.device import CopyChoice
from rayhicache.engines.transformers_engine import TransformersEngine
from rayhicache.memory.local import LocalPort
from rayhicache.testing.faults import ungated

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECONDS = 60.0
NEW = 24


def tokens_of(seed: int) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, 512, (512,), generator=dice).tolist()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_prefix_gives_the_bits_of_a_cold_run(dtype: str) -> None:
    spec = EngineSpec(vocab_size=512, num_blocks=9, dtype=dtype)
    with local_owner(64 << 20) as owner:
        # Rows by the copy engine, index pages by the kernel: one can come without the other.
        device = SleepyDevice(choice=CopyChoice(load=((8_192, 1.0),)))
        engine = TransformersEngine(spec, LocalPort(owner), device=device)
        logits: dict[str, list[torch.Tensor]] = {}

        def run(name: str, seed: int) -> tuple[int, ...]:
            logits[name] = []
            made = engine.generate(
                name,
                tokens_of(seed),
                NEW,
                on_logits=lambda start, found: logits[name].append(found[-1].clone()),
            )
            assert engine.settle(SECONDS)
            counts[name] = made.restored_local_tokens
            return made.tokens

        counts: dict[str, int] = {}
        cold = run("cold", 1)
        run("other", 2)
        device.sleepy = frozenset({"kv", "index"})
        warm = run("warm", 1)
        assert counts == {"cold": 0, "other": 0, "warm": 448}
        assert warm == cold
        for mine, theirs in zip(logits["warm"][-NEW:], logits["cold"][-NEW:], strict=True):
            assert torch.equal(mine, theirs)
        run("other again", 2)
        # Longer than the whole forward, which is slow beside so small a load.
        device.sleepy, device.cycles = frozenset({"index"}), 50 * SLEEP_CYCLES
        with ungated(engine.pools, {"index"}):
            garbled = run("garbled", 1)
        assert garbled != cold
        assert engine.close(SECONDS)
