"""Index keys of sparse attention (NSA/DSA), and the pool that holds them beside MLA rows.

An index block is all its keys, then all its scales:

    | key 0 | key 1 | ... | key n-1 | scale 0 | scale 1 | ... | scale n-1 |

These readers are the ones that elsewhere forgot to wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayhicache.core.layout import IndexFormat
from rayhicache.device.gate import Gate
from rayhicache.device.paged import PagedGather, Section
from rayhicache.device.protocols import Device
from rayhicache.pools.attention import MLAPool
from rayhicache.pools.base import Component, CompositePool, DevicePool, reader, writer


class IndexPool(DevicePool):
    """Index keys with their scales, as bytes. The same on every rank.

    Args:
        entries: index entries a block; fewer than its tokens where keys are pooled.
        index_format: bytes of a key and of a scale; the scale may have none.
    """

    def __init__(
        self,
        device: Device,
        gate: Gate,
        *,
        layer_ids: Sequence[int],
        num_blocks: int,
        block_tokens: int,
        entries: int,
        index_format: IndexFormat,
        name: str = "index",
        group: str = "full",
    ) -> None:
        self._device = device
        self._entries = entries
        self._format = index_format
        self._key_section = entries * index_format.key_bytes
        self._keys = Section(offset=0, entry_bytes=index_format.key_bytes)
        self._scales = Section(offset=self._key_section, entry_bytes=index_format.scale_bytes)
        super().__init__(
            device,
            gate,
            name=name,
            layer_ids=layer_ids,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            components=[
                Component(
                    name="key_scale", shape=(index_format.block_bytes(entries),), dtype=torch.uint8
                )
            ],
            group=group,
        )

    @reader
    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Whole blocks of a layer: `uint8[num_blocks, block_bytes], device`. Waits as `layer`."""
        return self.layer(layer_id)

    @reader
    def get_index_k_continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """Keys of one sequence, gathered: `uint8[seq_len, key_bytes], device`.

        Args:
            seq_len: index entries of the sequence.
            page_indices: `int[>= ceil(seq_len / entries)], device`: its blocks in order.

        Raises:
            InvalidRequest: fewer blocks than the sequence needs.
        """
        return self._sequence(layer_id, self._keys, seq_len, page_indices)

    @reader
    def get_index_k_scale_continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """Scales of one sequence, gathered: `uint8[seq_len, scale_bytes], device`."""
        return self._sequence(layer_id, self._scales, seq_len, page_indices)

    @reader
    def get_index_k_scale_buffer(
        self,
        layer_id: int,
        seq_len_tensor: torch.Tensor,
        page_indices: torch.Tensor,
        seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and scales of a ragged batch, gathered one sequence after the other.

        Args:
            seq_len_tensor: `int[batch], device`: index entries of each sequence.
            page_indices: `int[batch, max_pages], device`: blocks in order, padded with anything.
            seq_len_sum: sum of the lengths, as a host integer.
            max_seq_len: the longest of them, as a host integer.

        Returns:
            `uint8[seq_len_sum, key_bytes]` and `uint8[seq_len_sum, scale_bytes]`, device.

        Raises:
            InvalidRequest: the tables have no room for the longest sequence.
        """
        keys, scales = self._device.gather(
            PagedGather(
                blocks=self.layer(layer_id),
                entries=self._entries,
                sections=(self._keys, self._scales),
                tables=page_indices,
                lengths=seq_len_tensor,
                total=seq_len_sum,
                longest=max_seq_len,
            )
        )
        return keys, scales

    @writer
    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write entries.

        Args:
            loc: `int64[n], device`: entry slots (`block * entries + entry`).
            index_k: `uint8[n, key_bytes], device`.
            index_k_scale: `uint8[n, scale_bytes], device`; width 0 where there are no scales.
        """
        blocks = self._writable(layer_id)
        rows, entries = torch.div(loc, self._entries, rounding_mode="floor"), loc % self._entries
        keys, scales = self._sections(blocks)
        keys[rows, entries] = index_k
        scales[rows, entries] = index_k_scale

    def _sequence(
        self, layer_id: int, section: Section, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """One section of one sequence: `uint8[seq_len, entry_bytes], device`."""
        (found,) = self._device.gather(
            PagedGather(
                blocks=self.layer(layer_id),
                entries=self._entries,
                sections=(section,),
                tables=page_indices[None],
                lengths=None,
                total=seq_len,
                longest=seq_len,
            )
        )
        return found

    def _sections(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and scales: `uint8[num_blocks, entries, key_bytes or scale_bytes]`."""
        shape = (self.num_blocks, self._entries)
        keys = blocks[:, : self._key_section].view(*shape, self._format.key_bytes)
        return keys, blocks[:, self._key_section :].view(*shape, self._format.scale_bytes)


class NSAPool(CompositePool):
    """MLA rows and index keys of a sparse-attention model, as engines use them: one pool.

    Every reader here is a reader of a part and waits for that part's own pool, so index keys
    that come later than the rows are waited for as well, and the other way round.
    """

    def __init__(self, rows: MLAPool, index: IndexPool) -> None:
        super().__init__(rows, index)
        self._rows = rows
        self._index = index

    @reader
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """As `MLAPool.get_key_buffer`."""
        return self._rows.get_key_buffer(layer_id)

    @reader
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """As `MLAPool.get_value_buffer`."""
        return self._rows.get_value_buffer(layer_id)

    @reader
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `MLAPool.get_kv_buffer`."""
        return self._rows.get_kv_buffer(layer_id)

    @reader
    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """As `IndexPool.get_index_k_with_scale_buffer`."""
        return self._index.get_index_k_with_scale_buffer(layer_id)

    @reader
    def get_index_k_continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """As `IndexPool.get_index_k_continuous`."""
        return self._index.get_index_k_continuous(layer_id, seq_len, page_indices)

    @reader
    def get_index_k_scale_continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """As `IndexPool.get_index_k_scale_continuous`."""
        return self._index.get_index_k_scale_continuous(layer_id, seq_len, page_indices)

    @reader
    def get_index_k_scale_buffer(
        self,
        layer_id: int,
        seq_len_tensor: torch.Tensor,
        page_indices: torch.Tensor,
        seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `IndexPool.get_index_k_scale_buffer`."""
        return self._index.get_index_k_scale_buffer(
            layer_id, seq_len_tensor, page_indices, seq_len_sum, max_seq_len
        )

    @writer
    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """As `MLAPool.set_kv_buffer`."""
        self._rows.set_kv_buffer(layer_id, loc, latent, rope)

    @writer
    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """As `IndexPool.set_index_k_scale_buffer`."""
        self._index.set_index_k_scale_buffer(layer_id, loc, index_k, index_k_scale)
