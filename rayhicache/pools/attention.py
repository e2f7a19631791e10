"""Pools of attention keys and values: per head (MHA, GQA) and latent (MLA).

Token slot t is row `t % block_tokens` of block `t // block_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayhicache.core.layout import Sharding
from rayhicache.device.gate import Gate
from rayhicache.device.protocols import Device
from rayhicache.pools.base import Component, DevicePool, reader, writer


class MHAPool(DevicePool):
    """Keys and values per head. A width of 0 is legal.

    Args:
        num_heads: key-value heads on this rank.
        key_dim, value_dim: widths of a head.
        dtype: of both.
    """

    def __init__(
        self,
        device: Device,
        gate: Gate,
        *,
        layer_ids: Sequence[int],
        num_blocks: int,
        block_tokens: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        name: str = "kv",
        group: str = "full",
        sharding: Sharding = Sharding.PER_RANK,
    ) -> None:
        self._shapes = [(num_heads, key_dim), (num_heads, value_dim)]
        super().__init__(
            device,
            gate,
            name=name,
            layer_ids=layer_ids,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            components=[
                Component(name=part, shape=(block_tokens, num_heads, width), dtype=dtype)
                for part, width in (("key", key_dim), ("value", value_dim))
            ],
            group=group,
            sharding=sharding,
        )

    @reader
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer: `dtype[num_tokens, num_heads, key_dim], device`. Waits as `layer`."""
        return self.layer(layer_id, 0).flatten(0, 1)

    @reader
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Values of a layer: `dtype[num_tokens, num_heads, value_dim], device`."""
        return self.layer(layer_id, 1).flatten(0, 1)

    @reader
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    @writer
    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write tokens.

        Args:
            loc: `int64[n], device`: token slots, in blocks that the binding writes.
            key, value: `dtype[n, num_heads, key_dim or value_dim], device`.
        """
        for component, rows in enumerate((key, value)):
            self._writable(layer_id, component).flatten(0, 1)[loc] = rows


class MLAPool(DevicePool):
    """One row a token: the latent, then the rotary part. The same on every rank.

    Args:
        latent_dim: leading elements of a row that are also the values.
        row_dim: elements of a row: 576 in bf16 or raw fp8, 656 bytes of packed fp8.
        dtype: of an element; uint8 for packed rows.
    """

    def __init__(
        self,
        device: Device,
        gate: Gate,
        *,
        layer_ids: Sequence[int],
        num_blocks: int,
        block_tokens: int,
        latent_dim: int,
        row_dim: int,
        dtype: torch.dtype,
        name: str = "kv",
        group: str = "full",
    ) -> None:
        self._latent_dim = latent_dim
        super().__init__(
            device,
            gate,
            name=name,
            layer_ids=layer_ids,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            components=[Component(name="row", shape=(block_tokens, 1, row_dim), dtype=dtype)],
            group=group,
        )

    @reader
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Whole rows of a layer: `dtype[num_tokens, 1, row_dim], device`. Waits as `layer`."""
        return self.layer(layer_id).flatten(0, 1)

    @reader
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part: `dtype[num_tokens, 1, latent_dim], device`, a view of the rows."""
        return self.get_key_buffer(layer_id)[..., : self._latent_dim]

    @reader
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and their latent part."""
        rows = self.get_key_buffer(layer_id)
        return rows, rows[..., : self._latent_dim]

    @writer
    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Write tokens.

        Args:
            loc: `int64[n], device`: token slots, in blocks that the binding writes.
            latent: `dtype[n, 1, latent_dim], device`.
            rope: `dtype[n, 1, row_dim - latent_dim], device`.
        """
        self._writable(layer_id).flatten(0, 1)[loc] = torch.cat((latent, rope), dim=-1)
