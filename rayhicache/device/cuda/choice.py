"""Which way of copying serves which fragments."""

from __future__ import annotations

from dataclasses import dataclass

from rayhicache.device.protocols import Direction

Shares = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyChoice:
    """Which way the fragments of a pool take, by their size; measured on an H200.

    The copy engine takes no SM but about 0.6 us per fragment, so small fragments go by the
    kernel, and part of the middling ones beside the engine.

    Attributes:
        load, store: (fragment bytes, share of the rows that the kernel moves), ascending; the
            first that isn't smaller than the fragment counts, above the last one all rows go to
            the copy engine.
        strided_from: stores of fragments of at least this size take the strided copies, whole
            pages at a time.
        blocks_beside: blocks of the kernel beside the copy engine, times its share of the bytes.
        blocks_alone: its blocks when it moves everything.
    """

    load: Shares = ((28_672, 1.0),)
    store: Shares = ((36_864, 1.0),)
    strided_from: int = 36_865
    blocks_beside: int = 12
    blocks_alone: int = 16

    def kernel_rows(self, direction: Direction, nbytes: int, count: int) -> int:
        """How many of `count` rows of that fragment size the kernel moves."""
        shares = self.load if direction is Direction.LOAD else self.store
        share = next((share for size, share in shares if nbytes <= size), 0.0)
        return round(share * count)

    def blocks(self, kernel_bytes: int, all_bytes: int) -> int:
        """Blocks of the kernel when it moves that part of a plan's bytes."""
        if kernel_bytes == all_bytes:
            return self.blocks_alone
        return max(self.blocks_beside * kernel_bytes // all_bytes, 1)
