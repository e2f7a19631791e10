"""What to run: the description of an engine, made without loading anything."""

from __future__ import annotations

from dataclasses import dataclass

from rayhicache.errors import InvalidConfig, UnknownModel

MODELS = ("glm-dsa-tiny", "glm-dsa-small", "llama-tiny")
"""Models that are made on the spot, with random weights; see `rayhicache.engines.models`."""

DTYPES = ("float32", "bfloat16")
"""Dtypes of weights and of cached state."""

TOKENIZER_VOCAB = 129_280
"""Entries of the packaged tokenizer; a smaller vocabulary works on token ids alone."""

SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine: its model, and how much of the device it takes.

    Attributes:
        model: one of `MODELS`.
        seed: of the random weights; equal seeds are equal weights on every machine.
        num_blocks: device blocks, of one page each.
        dtype: one of `DTYPES`. Cold and restored runs are compared bit by bit in float32.
        max_positions: the longest prompt with its answer, in tokens.
        vocab_size: of the model.

    Raises:
        UnknownModel: with the list of known ones.
        InvalidConfig: a number out of its range, or an unknown dtype.
    """

    model: str = "glm-dsa-tiny"
    seed: int = 0
    num_blocks: int = 128
    dtype: str = "float32"
    max_positions: int = 8192
    vocab_size: int = TOKENIZER_VOCAB

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UnknownModel(
                asked=f"make an engine for model {self.model!r}",
                found="this build doesn't know it",
                remedy=f"name one of {', '.join(MODELS)}",
            )
        if self.dtype not in DTYPES:
            raise InvalidConfig(
                asked=f"make an engine of dtype {self.dtype!r}",
                found="it isn't supported",
                remedy=f"name one of {', '.join(DTYPES)}",
            )
        for name, value, low, high in (
            ("seed", self.seed, 0, SEED_MAX),
            ("num_blocks", self.num_blocks, 1, 2**31 - 1),
            ("max_positions", self.max_positions, 2, 2**31 - 1),
            ("vocab_size", self.vocab_size, 2, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise InvalidConfig(
                    asked=f"make an engine with {name} = {value}",
                    found="it is out of range",
                    remedy=f"choose {name} from {low} to {high}",
                )
