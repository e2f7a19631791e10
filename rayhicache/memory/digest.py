"""Digests of records: 64 bits per record and layer group, over where the bytes belong and them.

A multilinear sum over 64-bit words, sum(word[i] * c[i]) mod 2**64 with odd coefficients that
depend on the position, plus a hash of (key, generation, layout fingerprint, layer group). Any
change of one word changes the sum, words that trade places do, and right bytes under a wrong key
do. Both a CPU and a GPU compute it vectorised.

Source of the sum: D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from rayhicache.core.keys import PageKey, joined
from rayhicache.core.layout import RecordLayout
from rayhicache.core.slots import Region, SlotRef
from rayhicache.memory.owner import AdoptedRecord

WORD_BYTES = 8
_MASK = 0xFFFFFFFFFFFFFFFF


def _int64(value: int) -> int:
    """The signed integer with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=64)
def coefficients(count: int) -> torch.Tensor:
    """Odd pseudo-random `int64[count]`, the same on every machine: SplitMix64 of the position."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * _int64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # A logical shift: int64's own would drag the sign along.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _int64(factor)
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


def bytes_digest(rows: torch.Tensor) -> torch.Tensor:
    """Sum of each row: `int64[n]` of `uint8[n, nbytes]`, `nbytes` a multiple of 8."""
    words = rows.contiguous().view(torch.int64)
    return (words * coefficients(words.shape[-1])).sum(dim=-1)


def placed(total: int, key: PageKey, generation: int, place: tuple[str, int]) -> int:
    """The digest of one layer group: the sum of its bytes, and where they belong.

    Args:
        total: from `bytes_digest`.
        place: the layout's fingerprint and the number of the layer group.
    """
    fingerprint, group = place
    name = joined(
        key, generation.to_bytes(8, "little"), fingerprint.encode(), group.to_bytes(2, "little")
    )
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return (total + seed) & _MASK


def record_digests(
    layout: RecordLayout,
    region: Region,
    data: torch.Tensor,
    refs: Sequence[SlotRef],
    keys: Sequence[PageKey],
) -> list[tuple[int, ...]]:
    """Digests of whole records, one per layer group.

    Args:
        data: `uint8[num_slots * record_bytes], host`: all slots of the region.
    """
    runs = layout.shape(region.group).group_runs
    fingerprint = layout.fingerprint()
    records = data.view(region.num_slots, region.record_bytes)
    rows = torch.tensor([ref.slot - region.first_slot for ref in refs], dtype=torch.int64)
    sums = [bytes_digest(records[rows, r.offset : r.offset + r.nbytes]).tolist() for r in runs]
    return [
        tuple(
            placed(sums[group][at], key, ref.generation, (fingerprint, group))
            for group in range(len(runs))
        )
        for at, (ref, key) in enumerate(zip(refs, keys, strict=True))
    ]


def is_whole(record: AdoptedRecord) -> bool:
    """Whether an adopted record's bytes are those that were committed; for `ArenaOwner`.

    A record without digests can't be told from a torn one, so it isn't.
    """
    runs = record.layout.shape(record.group).group_runs
    if len(record.digests) != len(runs):
        return False
    fingerprint = record.layout.fingerprint()
    data = torch.frombuffer(record.data, dtype=torch.uint8).unsqueeze(0)
    return all(
        placed(
            int(bytes_digest(data[:, run.offset : run.offset + run.nbytes]).item()),
            record.key,
            record.ref.generation,
            (fingerprint, group),
        )
        == record.digests[group]
        for group, run in enumerate(runs)
    )
