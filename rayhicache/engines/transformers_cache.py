"""Cache layers of transformers over the pools: what a model keeps goes through the gate.

    attention ──update──────────► kv pool:    write the batch's tokens, read the whole sequences
    indexer ────update_indexer──► index pool: the same for index keys

Both write before they read, and each reader waits for its own pool's layer alone. Lengths and
mask sizes are asked for before layer 0 and are numbers of the host: they never wait.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rayhicache.engines.sequence import PagedBatch
from rayhicache.engines.state import ModelState, StateShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PooledLayer(CacheLayerMixin):
    """One layer of one forward. Use it inside `pools.reading(...)`, on the forward's thread."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, state: ModelState, layer_id: int, batch: PagedBatch) -> None:
        CacheLayerMixin.__init__(self)
        self._state = state
        self._layer_id = layer_id
        self._batch = batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to make: the pools are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the state of the forward's tokens, give back that of the whole sequences.

        Args:
            key_states, value_states: `dtype[rows, heads, tokens, width]`.

        Raises:
            LoadFailed, GateTimeout: the layer of this pool can't be read.
        """
        return self._state.update_kv(self._layer_id, self._batch, key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """As `update`, for index keys: `dtype[rows, tokens, width]`."""
        return self._state.update_index(self._layer_id, self._batch, indexer_key_states)

    def get_seq_length(self) -> int:
        """Tokens before the running forward, of the longest row. Doesn't wait."""
        return self._batch.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the forward attends to. Doesn't wait."""
        return self._batch.start + query_length, 0

    def get_max_length(self) -> int:
        """No maximum of its own."""
        return -1

    def get_max_cache_shape(self) -> int:
        """As `get_max_length`, under the name that earlier versions of transformers use."""
        return -1


def pooled_cache(state: ModelState, num_layers: int, batch: PagedBatch) -> Cache:
    """The cache of one forward, for a model of `num_layers` layers."""
    return Cache(layers=[PooledLayer(state, layer, batch) for layer in range(num_layers)])


class _Probe(PooledLayer):
    """A layer that keeps nothing and remembers what it was given."""

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self.kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self.index_dim = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.kv = (key_states, value_states)
        return self.kv

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        self.index_dim = indexer_key_states.shape[-1]
        return indexer_key_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def probe_state(model: PreTrainedModel, num_layers: int) -> dict[int, StateShape]:
    """What each layer keeps of a token, seen in a forward of one token."""
    layers = [_Probe() for _ in range(num_layers)]
    with torch.inference_mode():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device),
            use_cache=True,
            **{cache_keyword(model): Cache(layers=list(layers))},
        )
    shapes = {}
    for layer_id, layer in enumerate(layers):
        if layer.kv is not None:
            key, value = layer.kv
            shapes[layer_id] = StateShape(
                heads=key.shape[1],
                key_dim=key.shape[-1],
                value_dim=value.shape[-1],
                index_dim=layer.index_dim,
                dtype=key.dtype,
            )
    return shapes


def cache_keyword(model: PreTrainedModel) -> str:
    """How the model's `forward` wants its cache called: that changed between versions."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
