"""A worker's tier for benchmarks: GLM-5's pools on the GPU, and an owner in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rayhicache.client import TierClient
from rayhicache.core.layout import IndexFormat
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.gate import Gate
from rayhicache.device.limits import CopyLimits
from rayhicache.memory.local import LocalPort, arena_owner
from rayhicache.memory.port import Port
from rayhicache.pools.attention import MLAPool
from rayhicache.pools.base import PoolSet
from rayhicache.pools.index import IndexPool, NSAPool
from rayhicache.requests import Load, ModelIdentity, Prompt

PAGE = 64
SECONDS = 120.0


class CountingPort(LocalPort):
    """Counts the calls that are made through it."""

    calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("lookup", "reserve", "commit", "release", "abort", "doubt", "attach", "close"):
            CountingPort.calls += 1
        return super().__getattribute__(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What a worker has."""

    device: CudaDevice
    pool: NSAPool
    pools: PoolSet
    client: TierClient

    def fill(self, pages: int, seed: int = 0) -> Prompt:
        """Store a prompt of so many pages; they are committed when this returns."""
        dice = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 50_000, (pages * PAGE + 1,), generator=dice).tolist()
        prompt = self.client.prompt(tokens)
        blocks = self.take(pages)
        for start in range(0, pages, 128):
            stop = min(start + 128, pages)
            ticket = self.client.store(
                "fill", prompt, blocks[start:stop], start=start * PAGE, stop=stop * PAGE
            )
            assert ticket.result(SECONDS)
        self.pools.free(blocks)
        return prompt

    def take(self, count: int) -> list[int]:
        """Device blocks."""
        blocks = self.pools.allocate(count)
        assert blocks is not None
        return blocks

    def restore(self, prompt: Prompt, blocks: list[int]) -> None:
        """Look up, lease and load, until the last byte is there."""
        found = self.client.lookup(prompt)
        assert found.tokens == len(blocks) * PAGE
        assert self.client.load([Load(id="a", found=found, blocks=blocks)]).result(SECONDS)


def glm_pools(device: CudaDevice, layers: int, num_blocks: int) -> tuple[NSAPool, PoolSet]:
    """73,728 bytes of rows and 8,448 of index keys a page and layer."""
    gate = Gate()
    shape: dict[str, Any] = {
        "layer_ids": range(layers),
        "num_blocks": num_blocks,
        "block_tokens": PAGE,
    }
    pool = NSAPool(
        MLAPool(device, gate, latent_dim=512, row_dim=576, dtype=torch.bfloat16, **shape),
        IndexPool(
            device,
            gate,
            entries=PAGE,
            index_format=IndexFormat(key_bytes=128, scale_bytes=4),
            **shape,
        ),
    )
    return pool, PoolSet(device, gate, [pool])


@contextmanager
def tier_of(
    device: CudaDevice, *, layers: int, pages: int, num_blocks: int, port: Port | None = None
) -> Iterator[Tier]:
    """A client and its pools; the arena has room for `pages` and is registered.

    Args:
        port: to an owner elsewhere; None for one in this process.
    """
    pool, pools = glm_pools(device, layers, num_blocks)
    record_bytes = pools.layout(PAGE).shape().nbytes
    with arena_owner((pages + 2) * record_bytes + (64 << 20), folder="/dev/shm") as owner:
        client = TierClient(
            port or CountingPort(owner),
            pools,
            ModelIdentity(model="glm-5-shapes"),
            page_tokens=PAGE,
            limits=CopyLimits(copy_seconds=SECONDS),
        )
        assert device.wait_mapped(client._host.data), "the arena wasn't registered"
        try:
            yield Tier(device=device, pool=pool, pools=pools, client=client)
        finally:
            assert client.close(SECONDS)
