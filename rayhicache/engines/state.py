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
from rayhicache.engines.sequence import PagedSequence
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
    """Writes a chunk's state and reads the whole sequence's; all inside one binding."""

    pools: PoolSet

    def update_kv(
        self, layer_id: int, sequence: PagedSequence, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `dtype[1, heads, tokens, width]`, return the same of the whole sequence.

        Raises:
            LoadFailed, GateTimeout: as `LayerTransferCounter.wait_until`.
        """

    def update_index(
        self, layer_id: int, sequence: PagedSequence, key: torch.Tensor
    ) -> torch.Tensor:
        """Write `dtype[1, tokens, width]`, return the same of the whole sequence.

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
        self, layer_id: int, sequence: PagedSequence, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ModelState.update_kv`."""
        # [1, heads, tokens, width] of the model is [tokens, heads, width] in a pool.
        written = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._kv.pool.set_kv_buffer(layer_id, sequence.written, *written)
        keys, values = self._kv.read(layer_id, sequence.read)
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def update_index(
        self, layer_id: int, sequence: PagedSequence, key: torch.Tensor
    ) -> torch.Tensor:
        """See `ModelState.update_index`."""
        assert self._index is not None
        keys = key[0].contiguous().view(torch.uint8)
        no_scales = keys.new_empty((keys.shape[0], 0))
        self._index.set_index_k_scale_buffer(layer_id, sequence.written, keys, no_scales)
        whole = self._index.get_index_k_continuous(layer_id, sequence.stop, sequence.read_blocks)
        return whole.view(key.dtype).unsqueeze(0)
