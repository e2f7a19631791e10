from __future__ import annotations

import pytest
import torch

from rayhicache.config import EngineSpec
from rayhicache.testing.race import show_race


@pytest.mark.parametrize("pool", ["kv", "index"])
def test_the_race_garbles_without_the_gate_and_changes_nothing_under_it(pool: str) -> None:
    dice = torch.Generator().manual_seed(1)
    prompt, other = torch.randint(0, 512, (2, 320), generator=dice).tolist()
    found = show_race(EngineSpec(vocab_size=512), prompt, other, 16, pool=pool)
    assert found.tokens == 16
    assert found.differing > 0
    assert found.differing_gated == 0
