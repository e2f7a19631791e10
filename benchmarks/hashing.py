"""What page keys cost over the hash itself: 128k tokens in pages of 64.

The baseline is a bare `hashlib.blake2b` over the same bytes in the same pieces: 16 bytes of the
parent's key and the 256 bytes of a page's token ids, made beforehand.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import sys
import time

from benchmarks.report import Row, finish
from rayhicache.core.keys import KEY_BYTES, PageKey, page_keys, token_buffer

NUM_TOKENS = 128 * 1024
PAGE_TOKENS = 64
ROUNDS = 31
RATIO_MUST = 2.0


def pieces_of(parent: PageKey, tokens: list[int]) -> list[bytes]:
    """The bytes that go into each key."""
    buffer, step = token_buffer(tokens), PAGE_TOKENS * 4
    keys = [parent, *page_keys(parent, tokens, PAGE_TOKENS)]
    return [
        key + buffer[page * step : (page + 1) * step]
        for page, key in enumerate(keys[: len(tokens) // PAGE_TOKENS])
    ]


def main() -> int:
    """Measure both in turns, so that a busy machine slows both; the exit status."""
    chance = random.Random(0)
    tokens = [chance.randrange(129_280) for _ in range(NUM_TOKENS)]
    parent = PageKey(bytes(KEY_BYTES))
    pieces = pieces_of(parent, tokens)
    blake2b = hashlib.blake2b
    bare: list[float] = []
    ours: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        digests = [blake2b(piece, digest_size=KEY_BYTES).digest() for piece in pieces]
        between = time.perf_counter()
        keys = page_keys(parent, tokens, PAGE_TOKENS)
        end = time.perf_counter()
        assert keys == digests, "both must hash the same bytes"
        bare.append(between - start)
        ours.append(end - between)
    ratio = statistics.median(mine / base for mine, base in zip(ours, bare, strict=True))
    rows = [
        Row(
            name="page keys over bare blake2b, 128k tokens",
            value=ratio,
            unit="times",
            limit=1.0,
            must=RATIO_MUST,
            aim=1.5,
        ),
        Row(name="page keys", value=statistics.median(ours) * 1e3, unit="ms"),
        Row(name="bare blake2b", value=statistics.median(bare) * 1e3, unit="ms"),
    ]
    return finish("hashing", rows)


if __name__ == "__main__":
    sys.exit(main())
