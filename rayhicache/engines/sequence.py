"""What one forward adds to several sequences, and where the tokens that it reads lie in the pools.

Rows of different lengths are padded to a rectangle: queries on the left, so that each row's last
token is in the last column, and keys on the right, so that a key's column is its position.

    queries  | q0 q0 q0 q1 |        keys  | k0 k1 k2 k3 k3 k3 |
             | q0 q1 q2 q3 |              | k0 k1 k2 k3 k4 k5 |

A padded query is a copy of the row's first one, a padded key a copy of its last: nothing is read
that isn't the row's own, and what comes of the copies is dropped or masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The next tokens of one sequence.

    Attributes:
        blocks: device blocks of the sequence in order, enough for all tokens up to `stop`.
        tokens: token ids, at least one.
        start: position of the first; the tokens before it are in the blocks, or being loaded.
    """

    blocks: Sequence[int]
    tokens: Sequence[int]
    start: int

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def read(self, block_tokens: int) -> Sequence[int]:
        """Blocks that its forward reads."""
        return self.blocks[: -(-self.stop // block_tokens)]

    def written(self, block_tokens: int) -> Sequence[int]:
        """Blocks that its forward writes."""
        return self.blocks[self.start // block_tokens : -(-self.stop // block_tokens)]


class PagedBatch:
    """The rows of one forward as tensors on the device.

    Attributes:
        num_rows, num_queries, num_keys: the rectangle.
        tokens, positions: `int64[num_rows, num_queries]`.
        fresh: which of the rectangle's queries, flat, aren't padding: `int64[n]`; None for all.
        written: token slots of those: `int64[n]`.
        read: token slots of all keys: `int64[num_rows * num_keys]`.
        read_blocks: blocks that hold them, row by row: `int64[num_rows * blocks a row]`.
        picks: where each key lies in those blocks' tokens: `int64[num_rows * num_keys]`.
        start: tokens before the forward of the longest row; the mask's length goes by it.
    """

    def __init__(self, rows: Sequence[Row], block_tokens: int, device: torch.device) -> None:
        self.num_rows = len(rows)
        self.num_queries = max(len(row.tokens) for row in rows)
        self.num_keys = max(row.stop for row in rows)
        self.start = self.num_keys - self.num_queries
        pads = [self.num_queries - len(row.tokens) for row in rows]
        self.tokens = torch.tensor(
            [[row.tokens[0]] * pad + list(row.tokens) for row, pad in zip(rows, pads, strict=True)],
            device=device,
        )
        first = torch.tensor(
            [[row.start, row.stop, pad] for row, pad in zip(rows, pads, strict=True)]
        )
        starts, stops, padding = first.to(device).split(1, dim=1)
        columns = torch.arange(self.num_queries, device=device)
        self.positions = starts + (columns - padding).clamp(min=0)
        width = -(-self.num_keys // block_tokens)
        used = [list(row.read(block_tokens)) for row in rows]
        table = torch.tensor(
            [mine + mine[-1:] * (width - len(mine)) for mine in used], device=device
        )
        self.read_blocks = table.flatten()
        keys = torch.arange(self.num_keys, device=device).minimum(stops - 1)
        within = keys % block_tokens
        self.read = (table.gather(1, keys // block_tokens) * block_tokens + within).flatten()
        at_row = torch.arange(self.num_rows, device=device)[:, None] * (width * block_tokens)
        self.picks = (keys + at_row).flatten()
        of_queries = self.read.view_as(keys).gather(1, self.positions).flatten()
        self.fresh: torch.Tensor | None = None
        self.written = of_queries
        if any(pads):
            flat = [
                row * self.num_queries + column
                for row, pad in enumerate(pads)
                for column in range(pad, self.num_queries)
            ]
            self.fresh = torch.tensor(flat, device=device)
            self.written = of_queries[self.fresh]
        self._alike = len({(row.start, row.stop) for row in rows}) == 1

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What is added to attention's scores: `dtype[num_rows, 1, num_queries, num_keys]`.

        None where all rows have the same start and length: each query then sees what lies before
        it, which models and kernels know by themselves.
        """
        if self._alike:
            return None
        keys = torch.arange(self.num_keys, device=self.positions.device)
        hidden = keys > self.positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(
            hidden, torch.finfo(dtype).min
        )
