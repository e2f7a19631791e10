"""What an engine says to the client, and what it hears: prompts, finds and loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What makes the bytes of a model its own; see `rayhicache.core.keys.Namespace`."""

    model: str
    revision: str = ""
    config_digest: str = ""
    weights_version: int = 0
    dtype: str = "float32"
    parallel_shape: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and the keys of its whole pages; made by `TierClient.prompt`."""

    tokens: Sequence[int]
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a lookup found. Load it once, or release it.

    Attributes:
        prompt: that was looked up.
        hit: with its lease, which `load` takes over.
        lengths: how many leading tokens can be restored: ascending, whole device blocks, never
            the whole prompt, since its last token is always computed.
        pulled_tokens: how many of the longest came from another node for this lookup.
    """

    prompt: Prompt
    hit: Hit
    lengths: tuple[int, ...]
    pulled_tokens: int

    @property
    def tokens(self) -> int:
        """The longest restorable length in tokens, 0 for a miss."""
        return self.lengths[-1] if self.lengths else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One request's part of a load.

    Attributes:
        id: of the request; `LoadFailed` names it.
        found: from `lookup`.
        blocks: device blocks for the tokens [skip_tokens, skip_tokens + their tokens), in order,
            at most `found.tokens` in the end.
        skip_tokens: leading tokens that the engine has already, in whole blocks.
    """

    id: str
    found: Found
    blocks: Sequence[int]
    skip_tokens: int = 0
