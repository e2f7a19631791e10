"""Bytes that tell where they come from: page contents made from keys, and poison.

A block's contents derive from its key, pool, layer and component, so that any read can be
checked, and a block of another page, pool or layer is never taken for the right one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from rayhicache.core.keys import joined
from rayhicache.device.space import PoolMemory

POISON = 0xA5

Memories = Mapping[str, PoolMemory]


def content(key: bytes, pool: str, layer_id: int, component: int, nbytes: int) -> torch.Tensor:
    """What block `key` holds: `uint8[nbytes], host`. The same on every machine."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    name = joined(key, pool.encode(), layer_id.to_bytes(4, "big"), bytes([component]))
    return torch.frombuffer(bytearray(hashlib.shake_128(name).digest(nbytes)), dtype=torch.uint8)


def fill(memories: Memories, keys: Mapping[int, bytes]) -> None:
    """Write the contents of block `keys[b]` to block b of every layer of every pool."""
    for memory in memories.values():
        for component, tensor in enumerate(memory.components):
            for position, layer_id in enumerate(memory.spec.layer_ids):
                for block, key in keys.items():
                    tensor[position, block] = content(
                        key, memory.spec.name, layer_id, component, tensor.shape[-1]
                    )


def poison(memories: Memories, blocks: Iterable[int] | None = None) -> None:
    """Overwrite blocks of every layer of every pool with `POISON`; all blocks if None."""
    chosen = slice(None) if blocks is None else sorted(blocks)
    for memory in memories.values():
        for tensor in memory.components:
            tensor[:, chosen] = POISON


def check(memories: Memories, keys: Mapping[int, bytes]) -> None:
    """Assert that block b holds the contents of `keys[b]` in every layer of every pool.

    Raises:
        AssertionError: names the first pool, layer and block that doesn't, and says whether it
            holds poison.
    """
    for memory in memories.values():
        for component, tensor in enumerate(memory.components):
            for position, layer_id in enumerate(memory.spec.layer_ids):
                for block, key in keys.items():
                    found = tensor[position, block].cpu()
                    want = content(key, memory.spec.name, layer_id, component, found.numel())
                    assert torch.equal(found, want), _wrong(
                        f"component {component} of block {block} in layer {layer_id} of pool "
                        f"{memory.spec.name!r}",
                        found,
                    )


def is_poison(read: torch.Tensor) -> bool:
    """Whether every byte is poison; false for no bytes at all."""
    return read.numel() > 0 and bool((read.contiguous().view(torch.uint8) == POISON).all())


def _wrong(where: str, found: torch.Tensor) -> str:
    return f"{where} holds {'poison' if is_poison(found) else 'other bytes'}"
