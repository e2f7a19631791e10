from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from rayhicache.config import MODELS, EngineSpec
from rayhicache.engines import models

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """A model that is made on its device, with few weights."""
    make_config, make_model = models._BUILDERS["llama-3b"]

    def smaller(spec: EngineSpec) -> PretrainedConfig:
        config = make_config(spec)
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
        config.update(sizes | heads)
        return config

    monkeypatch.setitem(models._BUILDERS, "llama-3b", (smaller, make_model))
    return EngineSpec(model="llama-3b", vocab_size=64, dtype="bfloat16", seed=3)


def weights(spec: EngineSpec) -> torch.Tensor:
    model = models.build_model(spec, CPU)
    assert model.dtype is torch.bfloat16
    assert not any(weight.requires_grad for weight in model.parameters())
    return torch.cat([weight.flatten() for weight in model.parameters()])


def test_equal_seeds_are_equal_weights_and_the_callers_chance_is_kept(spec: EngineSpec) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = weights(spec)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(weights(spec), first)
    other = EngineSpec(model="llama-3b", vocab_size=64, dtype="bfloat16", seed=4)
    assert not torch.equal(weights(other), first)


@pytest.mark.parametrize("model", MODELS)
def test_weights_made_on_another_kind_of_device_share_no_page(model: str) -> None:
    spec = EngineSpec(model=model)
    differs = models.identity_of(spec, CPU) != models.identity_of(spec, GPU)
    assert differs == (model in models.MADE_ON_DEVICE)
