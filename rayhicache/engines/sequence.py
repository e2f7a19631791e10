"""Where one sequence's tokens lie in the pools, and what the running forward adds to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PagedSequence:
    """One sequence in device blocks. Not thread-safe: it belongs to one forward at a time.

    Args:
        blocks: device blocks in order, enough for all tokens that will ever be there.
        block_tokens: tokens a block.
        device: of the pools.
    """

    def __init__(self, blocks: Sequence[int], block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self._table = torch.tensor(list(blocks), dtype=torch.int64, device=device)
        at = torch.arange(block_tokens, device=device)
        self._slots = (self._table[:, None] * block_tokens + at).flatten()
        self.start = 0
        self.stop = 0

    def begin(self, start: int, stop: int) -> None:
        """The next forward computes the tokens [start, stop) on top of [0, start)."""
        assert 0 <= start < stop <= self._slots.numel()
        self.start, self.stop = start, stop

    @property
    def written(self) -> torch.Tensor:
        """Token slots that the forward fills: `int64[stop - start], device`."""
        return self._slots[self.start : self.stop]

    @property
    def read(self) -> torch.Tensor:
        """Token slots of the whole sequence: `int64[stop], device`."""
        return self._slots[: self.stop]

    @property
    def read_blocks(self) -> torch.Tensor:
        """Blocks of the whole sequence: `int64[ceil(stop / block_tokens)], device`."""
        return self._table[: -(-self.stop // self._block_tokens)]
