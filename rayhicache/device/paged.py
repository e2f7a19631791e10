"""Entries of paged memory, gathered: what a sequence's blocks hold, one entry after the other.

A block has sections, each an entry's part of every entry of the block:

    | key 0 | key 1 | ... | key n-1 | scale 0 | scale 1 | ... | scale n-1 |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayhicache.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Where one part of the entries lies in a block: entry e at `offset + e * entry_bytes`.

    Sections of no bytes are legal.
    """

    offset: int
    entry_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedGather:
    """Which entries of which sequences to gather, out of which blocks.

    Attributes:
        blocks: `uint8[num_blocks, block_bytes], device`, a block's bytes side by side.
        entries: of a block.
        sections: at most two.
        tables: `int32 or int64[batch, max_blocks], device`: the blocks of each sequence in order.
            What lies behind those that its length needs is padding: any number, never followed.
        lengths: `int32 or int64[batch], device`: entries of each sequence; None for one sequence
            of `total` entries.
        total: sum of the lengths.
        longest: the longest of them.

    Raises:
        InvalidRequest: the tables are too narrow for the longest sequence, or a number is
            negative.
    """

    blocks: torch.Tensor
    entries: int
    sections: tuple[Section, ...]
    tables: torch.Tensor
    lengths: torch.Tensor | None
    total: int
    longest: int

    def __post_init__(self) -> None:
        room = self.tables.shape[1] * self.entries
        if not 0 <= self.longest <= min(room, self.total):
            raise InvalidRequest(
                asked=f"gather {self.total} index entries, {self.longest} of one sequence",
                found=f"tables {tuple(self.tables.shape)} of blocks of {self.entries} entries",
                remedy="pass the lengths' sum and their maximum, and tables that have room",
            )


def gather_with_torch(gather: PagedGather) -> tuple[torch.Tensor, ...]:
    """Gather with torch's own operations: `uint8[total, entry_bytes], device` per section.

    Waits for a GPU, which has to say how many entries there are.

    Raises:
        InvalidRequest: an index within a sequence's length is none of the blocks.
    """
    blocks, device = gather.blocks, gather.blocks.device
    at = torch.arange(gather.longest, device=device)
    if gather.lengths is None:
        rows = gather.tables.long()[0, at // gather.entries]
        entries = at % gather.entries
    else:
        inside = at[None, :] < gather.lengths.long()[:, None]
        rows = gather.tables.long()[:, at // gather.entries][inside]
        entries = (at % gather.entries).expand(inside.shape)[inside]
    assert rows.numel() == gather.total, "the lengths' sum isn't the total"
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < blocks.shape[0]:
        raise InvalidRequest(
            asked=f"gather {gather.total} index entries",
            found=f"block indices from {int(rows.min())} to {int(rows.max())}",
            remedy=f"the pool has {blocks.shape[0]} blocks",
        )
    found = []
    for section in gather.sections:
        stop = section.offset + gather.entries * section.entry_bytes
        shape = (blocks.shape[0], gather.entries, section.entry_bytes)
        found.append(blocks[:, section.offset : stop].view(shape)[rows, entries])
    return tuple(found)
