"""The state that a model keeps, seen by one tiny forward, and pools of just that shape.

Nothing is read from a model's config: versions of transformers differ in what they keep (the
latent or expanded heads), and a width that is seen can't be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypedDict

import torch

from rayhicache.core.layout import IndexFormat
from rayhicache.device.gate import Gate
from rayhicache.device.protocols import Device
from rayhicache.engines.sequence import PagedBatch
from rayhicache.errors import InvalidLayout
from rayhicache.pools.attention import MHAPool, MLAPool
from rayhicache.pools.base import CompositePool, DevicePool, PoolSet
from rayhicache.pools.index import IndexPool, NSAPool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What one layer keeps of a token.

    Attributes:
        heads: key-value heads; 1 where the state is latent.
        key_dim, value_dim: elements a head; of a latent state the latent and the rotary part.
        index_dim: elements of an index key, 0 for a layer without an indexer.
        dtype: of all.
    """

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int
    dtype: torch.dtype


class ModelState(Protocol):
    """Writes what a forward computes and reads its whole sequences; all inside one binding."""

    pools: PoolSet

    def update_kv(
        self, layer_id: int, batch: PagedBatch, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `dtype[rows, heads, tokens, width]`, return the same of the whole sequences.

        Raises:
            LoadFailed, GateTimeout: as `LayerTransferCounter.wait_until`.
        """

    def update_index(self, layer_id: int, batch: PagedBatch, key: torch.Tensor) -> torch.Tensor:
        """Write `dtype[rows, tokens, width]`, return the same of the whole sequences.

        Raises:
            LoadFailed, GateTimeout: as `LayerTransferCounter.wait_until`.
        """


def make_state(
    device: Device, shapes: Mapping[int, StateShape], *, num_blocks: int, block_tokens: int
) -> ModelState:
    """Pools for what the layers keep.

    Args:
        shapes: by layer id.

    Raises:
        InvalidLayout: layers of different shapes, or no layer that keeps anything.
    """
    kept = {(s.heads, s.key_dim, s.value_dim, s.dtype) for s in shapes.values()}
    index_dims = {shape.index_dim for shape in shapes.values() if shape.index_dim}
    if len(kept) != 1 or len(index_dims) > 1:
        raise InvalidLayout(
            asked=f"make pools for {len(shapes)} layers",
            found=f"their state differs: {sorted(map(str, kept))}, index keys of {index_dims}",
            remedy="use a model whose layers all keep the same shape",
        )
    shape = next(iter(shapes.values()))
    gate = Gate()
    blocks = _Blocks(num_blocks=num_blocks, block_tokens=block_tokens)
    kv = (_Latent if shape.heads == 1 else _Heads)(device, gate, sorted(shapes), shape, blocks)
    if not index_dims:
        return PooledState(PoolSet(device, gate, [kv.pool]), kv, None)
    index = IndexPool(
        device,
        gate,
        layer_ids=sorted(layer_id for layer_id, s in shapes.items() if s.index_dim),
        entries=block_tokens,
        index_format=IndexFormat(key_bytes=index_dims.pop() * shape.dtype.itemsize, scale_bytes=0),
        **blocks,
    )
    return PooledState(PoolSet(device, gate, kv.joined(index)), kv, index)


class _Blocks(TypedDict):
    num_blocks: int
    block_tokens: int


class _Latent:
    """A pool of one row a token: the latent, then the rotary part."""

    def __init__(
        self, device: Device, gate: Gate, layer_ids: list[int], shape: StateShape, blocks: _Blocks
    ) -> None:
        self._latent_dim = shape.key_dim
        self.pool = MLAPool(
            device,
            gate,
            layer_ids=layer_ids,
            latent_dim=shape.key_dim,
            row_dim=shape.key_dim + shape.value_dim,
            dtype=shape.dtype,
            **blocks,
        )

    def joined(self, index: IndexPool) -> list[DevicePool | CompositePool]:
        return [NSAPool(self.pool, index)]

    def read(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, latent = self.pool.get_kv_buffer(layer_id)
        return latent[slots], rows[..., self._latent_dim :][slots]


class _Heads:
    """A pool of keys and values per head."""

    def __init__(
        self, device: Device, gate: Gate, layer_ids: list[int], shape: StateShape, blocks: _Blocks
    ) -> None:
        self.pool = MHAPool(
            device,
            gate,
            layer_ids=layer_ids,
            num_heads=shape.heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=shape.dtype,
            **blocks,
        )

    def joined(self, index: IndexPool) -> list[DevicePool | CompositePool]:
        return [self.pool, index]

    def read(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.pool.get_kv_buffer(layer_id)
        return keys[slots], values[slots]


class PooledState:
    """A `ModelState` in a pool of rows or heads, with or without a pool of index keys."""

    def __init__(self, pools: PoolSet, kv: _Latent | _Heads, index: IndexPool | None) -> None:
        self.pools = pools
        self._kv = kv
        self._index = index

    def update_kv(
        self, layer_id: int, batch: PagedBatch, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ModelState.update_kv`."""
        # [rows, heads, tokens, width] of the model is [tokens, heads, width] in a pool.
        written = [_fresh(batch, part.transpose(1, 2)) for part in (key, value)]
        self._kv.pool.set_kv_buffer(layer_id, batch.written, *written)
        keys, values = self._kv.read(layer_id, batch.read)
        rows = (batch.num_rows, batch.num_keys)
        return keys.unflatten(0, rows).transpose(1, 2), values.unflatten(0, rows).transpose(1, 2)

    def update_index(self, layer_id: int, batch: PagedBatch, key: torch.Tensor) -> torch.Tensor:
        """See `ModelState.update_index`."""
        assert self._index is not None
        keys = _fresh(batch, key).contiguous().view(torch.uint8)
        no_scales = keys.new_empty((keys.shape[0], 0))
        self._index.set_index_k_scale_buffer(layer_id, batch.written, keys, no_scales)
        blocks = batch.read_blocks
        entries = blocks.numel() * self.pools.block_tokens
        # The rows' blocks one after the other, as if they were those of one sequence.
        whole = self._index.get_index_k_continuous(layer_id, entries, blocks)[batch.picks]
        return whole.view(key.dtype).view(batch.num_rows, batch.num_keys, -1)


def _fresh(batch: PagedBatch, part: torch.Tensor) -> torch.Tensor:
    """The tokens of `[rows, tokens, ...]` that aren't padding: `[n, ...]`."""
    flat = part.flatten(0, 1)
    return flat if batch.fresh is None else flat.index_select(0, batch.fresh)
