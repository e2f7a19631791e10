"""Forwards of one model over its pools, each bound to the blocks that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rayhicache.device.protocols import Device
from rayhicache.engines.sequence import PagedBatch, Row
from rayhicache.engines.state import ModelState, make_state
from rayhicache.engines.transformers_cache import cache_keyword, pooled_cache, probe_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelRunner:
    """A model and pools of the shape that it was seen to keep. One forward at a time.

    Args:
        num_blocks: device blocks.
        block_tokens: tokens of each.

    Raises:
        InvalidLayout: as `make_state`.
    """

    def __init__(
        self, model: PreTrainedModel, device: Device, *, num_blocks: int, block_tokens: int
    ) -> None:
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self._num_layers = int(config.num_hidden_layers)
        torch.nn.Module.to(model, device=device.torch_device)
        self._model = model
        self._keyword = cache_keyword(model)
        self._device = device
        shapes = probe_state(self._model, self._num_layers)
        self._state: ModelState = make_state(
            device, shapes, num_blocks=num_blocks, block_tokens=block_tokens
        )
        self.pools = self._state.pools

    def forward(self, rows: Sequence[Row], *, whole: bool) -> torch.Tensor:
        """Compute the rows' tokens on top of what lies before them, in one forward.

        Starts at once: readers of blocks that a load is filling wait layer by layer, for the
        loads of these rows' blocks and for no other.

        The bits of a row depend on the shape of the rectangle, and on what the other rows hold
        where a model lets rows meet, as experts do: equal rows in equal order give equal bits,
        whether what lies before them was computed or restored.

        Args:
            rows: of different sequences, each with blocks of its own.
            whole: logits of every token, not only of each row's last.

        Returns:
            `dtype[rows, tokens or 1, vocab_size], device`; a row shorter than the longest has
            its tokens in the last columns.

        Raises:
            LoadFailed, GateTimeout: what lies before can't be read; the blocks of these tokens
                may be partly written.
            PageBusy: a load is filling a block that would be written.
        """
        block = self.pools.block_tokens
        batch = PagedBatch(rows, block, self._device.torch_device)
        reads = [at for row in rows for at in row.read(block)]
        writes = [at for row in rows for at in row.written(block)]
        with self.pools.reading(reads, writes=writes), torch.inference_mode():
            return self.forward_bound(batch, whole=whole)

    def forward_bound(self, batch: PagedBatch, *, whole: bool) -> torch.Tensor:
        """As `forward`, inside the caller's binding."""
        output = self._model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=batch.mask(self._model.dtype),
            use_cache=True,
            logits_to_keep=0 if whole else 1,
            **{self._keyword: pooled_cache(self._state, self._num_layers, batch)},
        )
        logits: torch.Tensor = output.logits
        return logits
