"""Page keys: a chained hash of everything that a page's bytes depend on.

    seed   = H(namespace)
    key[0] = H(seed, tokens of page 0)
    key[i] = H(key[i-1], tokens of page i)

Equal keys mean equal bytes, so whatever can change a page's bytes is hashed: the model and its
configuration through the namespace, all tokens before the page through the chain, and inputs
that are not tokens (images, audio, embeddings share placeholder ids) through their digests.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NewType, cast

from rayhicache.errors import InvalidRequest

PageKey = NewType("PageKey", bytes)

KEY_BYTES = 16
TOKEN_BYTES = 4
# Small enough that packing a chunk reuses memory that is in the cache and mapped already.
CHUNK_TOKENS = 4096

# Copying a fresh hasher is faster than making one: the parameters aren't parsed for each page.
_EMPTY = hashlib.blake2b(digest_size=KEY_BYTES)


def joined(*parts: bytes) -> bytes:
    """Join length-prefixed parts, so that ("a", "bc") and ("ab", "c") differ."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a page's bytes depend on besides its tokens. Keys never cross namespaces.

    Attributes:
        model: name or path of the model.
        revision: commit or version of its weights.
        config_digest: digest of the whole configuration: overrides, quantisation, KV scales,
            the backend's KV format.
        weights_version: bumped by a weight update; every earlier page then misses.
        adapter: name and version of a LoRA adapter, empty for none.
        salt: a tenant's secret, empty for none.
        dtype: dtype of the computation.
        page_tokens: tokens a page.
        layout_fingerprint: hex digest of the record layout.
        parallel_shape: tensor-parallel shape, empty unless some pool is sharded by it.
    """

    model: str
    revision: str
    config_digest: str
    weights_version: int
    adapter: str
    salt: str
    dtype: str
    page_tokens: int
    layout_fingerprint: str
    parallel_shape: str

    def seed(self) -> PageKey:
        """The parent of a prompt's first page: the hash of all fields, length-prefixed."""
        parts = [str(getattr(self, field.name)).encode() for field in fields(self)]
        return PageKey(hashlib.blake2b(joined(*parts), digest_size=KEY_BYTES).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpan:
    """A non-token input: its placeholder tokens are [start, stop), its content has `digest`."""

    start: int
    stop: int
    digest: bytes


def token_buffer(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32.

    Raises:
        InvalidRequest: an id is negative, over 32 bits, or not an integer.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as fault:
        raise InvalidRequest(
            asked="hash a prompt",
            found=f"token ids must be integers in [0, 2**32): {fault}",
            remedy="pass the tokenizer's ids",
        ) from fault
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def page_keys(
    parent: PageKey,
    tokens: Sequence[int],
    page_tokens: int,
    inputs: Sequence[InputSpan] = (),
    *,
    first_token: int = 0,
) -> list[PageKey]:
    """Keys of the whole pages of `tokens`; what is left over at the end has no key.

    Args:
        parent: the namespace's seed, or the key of the page before `tokens`.
        tokens: ids; position i of the prompt is `first_token + i`.
        page_tokens: tokens a page.
        inputs: spans in positions of the prompt.
        first_token: position of `tokens[0]` in the prompt, a multiple of `page_tokens`.

    Raises:
        InvalidRequest: an id of a whole page that is no uint32.
    """
    assert first_token % page_tokens == 0
    if inputs:
        return _keys_with_inputs(parent, tokens, page_tokens, inputs, first_token)
    whole = len(tokens) - len(tokens) % page_tokens
    chunk = max(CHUNK_TOKENS // page_tokens, 1) * page_tokens
    step = page_tokens * TOKEN_BYTES
    fresh = _EMPTY.copy
    key: bytes = parent
    keys: list[bytes] = []
    for first in range(0, whole, chunk):
        buffer = token_buffer(tokens[first : min(first + chunk, whole)])
        for at in range(0, len(buffer), step):
            hasher = fresh()
            hasher.update(key + buffer[at : at + step])
            key = hasher.digest()
            keys.append(key)
    return cast("list[PageKey]", keys)


def _keys_with_inputs(
    parent: PageKey,
    tokens: Sequence[int],
    page_tokens: int,
    inputs: Sequence[InputSpan],
    first_token: int,
) -> list[PageKey]:
    buffer = token_buffer(tokens)
    keys: list[PageKey] = []
    key: bytes = parent
    for index in range(len(tokens) // page_tokens):
        start = first_token + index * page_tokens
        at = index * page_tokens * TOKEN_BYTES
        pieces = [key, buffer[at : at + page_tokens * TOKEN_BYTES]]
        for span in inputs:
            if span.start < start + page_tokens and span.stop > start:
                # The offset says which part of the input this page sees.
                offset = (start - span.start).to_bytes(8, "little", signed=True)
                pieces.append(joined(offset, span.digest))
        key = hashlib.blake2b(b"".join(pieces), digest_size=KEY_BYTES).digest()
        keys.append(PageKey(key))
    return keys
