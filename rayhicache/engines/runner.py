"""Forwards of one model over its pools, each bound to the blocks that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rayhicache.device.protocols import Device
from rayhicache.engines.sequence import PagedSequence
from rayhicache.engines.state import ModelState, make_state
from rayhicache.engines.transformers_cache import cache_keyword, pooled_cache, probe_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnLogits = Callable[[int, torch.Tensor], None]


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

    def sequence(self, blocks: Sequence[int]) -> RunningSequence:
        """A sequence in these blocks; nothing is read or written yet."""
        return RunningSequence(self, blocks)

    def cache_of(self, sequence: PagedSequence) -> dict[str, object]:
        """The keyword argument that hands a sequence's cache to the model."""
        return {self._keyword: pooled_cache(self._state, self._num_layers, sequence)}

    def logits(
        self, tokens: Sequence[int], start: int, cache: dict[str, object], *, whole: bool
    ) -> torch.Tensor:
        """Logits of these tokens, or of the last: `dtype[tokens or 1, vocab_size], device`."""
        at = self._device.torch_device
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([list(tokens)], dtype=torch.int64, device=at),
                position_ids=torch.arange(start, start + len(tokens), device=at)[None],
                use_cache=True,
                logits_to_keep=0 if whole else 1,
                **cache,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


class RunningSequence:
    """One sequence in device blocks, computed chunk by chunk."""

    def __init__(self, runner: ModelRunner, blocks: Sequence[int]) -> None:
        self._runner = runner
        self._blocks = tuple(blocks)
        self._block_tokens = runner.pools.block_tokens
        self._paged = PagedSequence(
            self._blocks, self._block_tokens, runner.pools.device.torch_device
        )
        self._cache = runner.cache_of(self._paged)

    def forward(self, tokens: Sequence[int], start: int, on_logits: OnLogits | None = None) -> int:
        """Compute the tokens at [start, start + len(tokens)) on top of what lies before.

        Starts at once: readers of blocks that a load is filling wait layer by layer.

        Returns:
            The likeliest next token.

        Raises:
            LoadFailed, GateTimeout: what lies before can't be read; the blocks of these tokens
                may be partly written.
        """
        stop = start + len(tokens)
        self._paged.begin(start, stop)
        first, end = start // self._block_tokens, -(-stop // self._block_tokens)
        with self._runner.pools.reading(self._blocks[:end], writes=self._blocks[first:end]):
            logits = self._runner.logits(tokens, start, self._cache, whole=on_logits is not None)
        if on_logits is not None:
            on_logits(start, logits)
        return int(logits[-1].argmax())
