"""Models made on the spot: real architectures, random weights, no download."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from rayhicache.config import MODELS, EngineSpec
from rayhicache.engines.attention import GROUPED
from rayhicache.requests import ModelIdentity

HOST = torch.device("cpu")
MADE_ON_DEVICE = frozenset({"llama-3b"})
"""Models too large to be made on the host in time."""

_NO_SPECIAL_TOKENS: dict[str, Any] = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config_of(spec: EngineSpec) -> PretrainedConfig:
    """The configuration of a spec's model."""
    return _BUILDERS[spec.model][0](spec)


def build_model(spec: EngineSpec, device: torch.device = HOST) -> PreTrainedModel:
    """The model of a spec, for inference; the caller's random state is kept.

    Small models take a second, are made on the host and have equal weights everywhere; those of
    `MADE_ON_DEVICE` take seconds, and are left on the device.
    """
    dtype = getattr(torch, spec.dtype)
    if spec.model in MADE_ON_DEVICE:
        model = _made_there(spec, device, dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            model = _BUILDERS[spec.model][1](config_of(spec))
        # PyTorch's own `to`: that of transformers, which wraps it, hides its types.
        torch.nn.Module.to(model, dtype=dtype)
    model.eval()
    model.requires_grad_(False)
    return model


def identity_of(spec: EngineSpec, device: torch.device = HOST) -> ModelIdentity:
    """What makes the cached bytes of this model its own.

    The version of transformers is part of it: it decides what a cache layer is given to keep.
    So is the kind of device that a model's weights were made on.
    """
    config = {
        "config": config_of(spec).to_dict(),
        "transformers": importlib.metadata.version("transformers"),
    }
    made_on = f"-{device.type}" if spec.model in MADE_ON_DEVICE else ""
    packed = json.dumps(config, sort_keys=True, default=str).encode()
    return ModelIdentity(
        model=spec.model,
        revision=f"seed-{spec.seed}{made_on}",
        config_digest=hashlib.blake2b(packed, digest_size=16).hexdigest(),
        dtype=spec.dtype,
    )


def _made_there(spec: EngineSpec, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    generators = [] if device == HOST else [device]
    with torch.random.fork_rng(devices=generators), device:
        torch.manual_seed(spec.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(spec), dtype=dtype)
    return model


def _glm_dsa(spec: EngineSpec, **larger: int) -> PretrainedConfig:
    """Sparse attention in which one wrong index key shows.

    `index_topk` is far under the length of a prompt, or the index would choose everything; four
    index heads would tie at the cut, so there are sixteen.
    """
    values: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "index_topk": 32,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "initializer_range": 0.05,
    } | larger
    return _eager(
        GlmMoeDsaConfig(
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_positions,
            **values,
            **_NO_SPECIAL_TOKENS,
        )
    )


def _glm_dsa_small(spec: EngineSpec) -> PretrainedConfig:
    return _glm_dsa(spec, hidden_size=256, intermediate_size=512, num_hidden_layers=12)


def _llama(spec: EngineSpec) -> PretrainedConfig:
    return _eager(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_positions,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.05,
            **_NO_SPECIAL_TOKENS,
        )
    )


def _llama_3b(spec: EngineSpec) -> PretrainedConfig:
    """The shape of Llama-3.2-3B: 3.2 billion parameters, 112 KiB of keys and values a token."""
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_positions,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        **_NO_SPECIAL_TOKENS,
    )
    config._attn_implementation = GROUPED
    return config


def _eager(config: PretrainedConfig) -> PretrainedConfig:
    # Plain kernels whose rounding depends on the shapes alone.
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


_Builder = tuple[Callable[[EngineSpec], PretrainedConfig], Callable[[Any], PreTrainedModel]]

_BUILDERS: dict[str, _Builder] = {
    "glm-dsa-tiny": (_glm_dsa, GlmMoeDsaForCausalLM),
    "glm-dsa-small": (_glm_dsa_small, GlmMoeDsaForCausalLM),
    "llama-tiny": (_llama, LlamaForCausalLM),
    "llama-3b": (_llama_3b, LlamaForCausalLM),
}
assert tuple(_BUILDERS) == MODELS
