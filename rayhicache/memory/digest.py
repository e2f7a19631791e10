"""Digests of records: 64 bits per record and layer group, over where the bytes belong and them.

A multilinear sum over 64-bit words, sum(word[i] * c[i]) mod 2**64 with odd coefficients that
depend on the position, plus a hash of (key, generation, layout fingerprint, layer group). Any
change of one word changes the sum, words that trade places do, and right bytes under a wrong key
do. Both a CPU and a GPU compute it vectorised.

Only the bytes of fragments count, each at its place in the layer group: what lies between them
in a record counts as zero. So the device's own blocks, which have nothing between them, give the
same sums, fragment by fragment in any order.

Source of the sum: D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from rayhicache.core.keys import PageKey, joined
from rayhicache.core.layout import RecordLayout
from rayhicache.core.slots import Region, SlotRef, slots_of
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


@lru_cache(maxsize=64)
def counted(layout: RecordLayout, record_group: str, group: int) -> torch.Tensor | None:
    """Which bits of a layer group's words are fragments': `int64[nbytes / 8]`; None for all."""
    shape = layout.shape(record_group)
    run = shape.group_runs[group]
    mask = torch.zeros(run.nbytes, dtype=torch.uint8)
    for fragment in shape.fragments:
        if fragment.layer_id in run.layer_ids:
            start = fragment.offset - run.offset
            mask[start : start + fragment.nbytes] = 0xFF
    return None if bool(mask.all()) else mask.view(torch.int64)


def run_sums(
    layout: RecordLayout, record_group: str, group: int, rows: torch.Tensor
) -> torch.Tensor:
    """Sums of whole layer groups: `int64[n]` of `uint8[n, nbytes of the group], host`."""
    if not rows.shape[1]:
        return torch.zeros(rows.shape[0], dtype=torch.int64)
    words = rows.contiguous().view(torch.int64)
    mask = counted(layout, record_group, group)
    if mask is not None:
        words = words & mask
    return (words * coefficients(words.shape[-1])).sum(dim=-1)


def fragment_sums(rows: torch.Tensor, position: int, factors: torch.Tensor) -> torch.Tensor:
    """What fragments of some bytes add to their layer group's sums: `int64[n]` of `uint8[n, > 0]`.

    Args:
        position: of their first byte in the layer group; any.
        factors: `coefficients` of at least the layer group's words, where the rows are.
    """
    first, lead = divmod(position, WORD_BYTES)
    nbytes = rows.shape[1]
    count = -(-(lead + nbytes) // WORD_BYTES)
    aligned = not lead and not nbytes % WORD_BYTES and not rows.storage_offset() % WORD_BYTES
    if aligned and rows.is_contiguous():
        padded = rows
    else:
        padded = rows.new_zeros((rows.shape[0], count * WORD_BYTES))
        padded[:, lead : lead + nbytes] = rows
    return (padded.view(torch.int64) * factors[first : first + count]).sum(dim=-1)


def placed(total: int, key: PageKey, generation: int, place: tuple[str, int]) -> int:
    """The digest of one layer group: the sum of its bytes, and where they belong.

    Args:
        total: from `run_sums`, or the sum of its fragments'.
        place: the layout's fingerprint and the number of the layer group.
    """
    fingerprint, group = place
    name = joined(
        key, generation.to_bytes(8, "little"), fingerprint.encode(), group.to_bytes(2, "little")
    )
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return (total + seed) & _MASK


def placed_sums(
    layout: RecordLayout,
    sums: Sequence[Sequence[int]],
    refs: Sequence[SlotRef],
    keys: Sequence[PageKey],
) -> list[tuple[int, ...]]:
    """Digests of records from their sums: `[records][layer groups]`, as `placed` makes each."""
    fingerprint = layout.fingerprint()
    return [
        tuple(
            placed(total, key, ref.generation, (fingerprint, group))
            for group, total in enumerate(totals)
        )
        for totals, ref, key in zip(sums, refs, keys, strict=True)
    ]


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
    records = data.view(region.num_slots, region.record_bytes)
    rows = torch.tensor(slots_of(refs), dtype=torch.int64) - region.first_slot
    sums = [
        run_sums(layout, region.group, group, records[rows, run.offset : run.offset + run.nbytes])
        for group, run in enumerate(layout.shape(region.group).group_runs)
    ]
    return placed_sums(layout, torch.stack(sums, dim=1).tolist(), refs, keys)


def is_whole(record: AdoptedRecord) -> bool:
    """Whether an adopted record's bytes are those that were committed; for `ArenaOwner`.

    A record without digests can't be told from a torn one, so it isn't.
    """
    runs = record.layout.shape(record.group).group_runs
    if len(record.digests) != len(runs):
        return False
    fingerprint = record.layout.fingerprint()
    data = torch.frombuffer(record.data, dtype=torch.uint8).unsqueeze(0)
    for group, run in enumerate(runs):
        rows = data[:, run.offset : run.offset + run.nbytes]
        total = int(run_sums(record.layout, record.group, group, rows).item())
        place = (fingerprint, group)
        if placed(total, record.key, record.ref.generation, place) != record.digests[group]:
            return False
    return True
