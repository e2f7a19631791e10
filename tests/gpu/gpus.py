"""Words for tests on a GPU: a device whose copies come late, and pools with an arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayhicache.core.layout import IndexFormat
from rayhicache.core.plan import plan_pages
from rayhicache.core.slots import divide_regions
from rayhicache.device.copier import Copier, LoadRequest, StoreRequest
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.movers import Mover
from rayhicache.device.cuda.stream import CudaEvent, CudaStream
from rayhicache.device.cuda.words import WordEvent
from rayhicache.device.gate import Gate
from rayhicache.device.limits import CopyLimits
from rayhicache.device.space import HostRegion, TransferSpace
from rayhicache.device.staging import StagedPlan
from rayhicache.device.ticket import Ticket
from rayhicache.pools.attention import MLAPool
from rayhicache.pools.base import PoolSet
from rayhicache.pools.index import IndexPool, NSAPool
from rayhicache.testing import poison

SECONDS = 60.0
SLEEP_CYCLES = 20_000_000  # about 10 ms
LAYERS, BLOCKS, SLOTS, PAGE = 4, 24, 8, 64


class SleepyMover:
    """Sleeps on the GPU before each layer's copy, on a stream that the copy waits for."""

    def __init__(self, inner: Mover, cycles: int, bed: torch.cuda.Stream) -> None:
        self._inner = inner
        self._cycles = cycles
        self._bed = bed

    def after(self, event: CudaEvent) -> None:
        self._inner.after(event)

    def begin(self) -> None:
        self._sleep()
        self._inner.begin()

    def enqueue(self, position: int) -> WordEvent | CudaEvent:
        self._sleep()
        return self._inner.enqueue(position)

    def _sleep(self) -> None:
        event = CudaEvent()
        with torch.cuda.stream(self._bed):
            torch.cuda._sleep(self._cycles)
            event.event.record(self._bed)
        self._inner.after(event)

    def last(self) -> WordEvent | CudaEvent | None:
        return self._inner.last()


class SleepyDevice(CudaDevice):
    """A GPU on which the copies of some pools come late."""

    sleepy: frozenset[str] = frozenset()
    cycles: int = SLEEP_CYCLES

    def _movers(self, staged: StagedPlan, stream: CudaStream) -> dict[str, tuple[Mover, ...]]:
        bed = torch.cuda.Stream(self.torch_device)
        return {
            pool: tuple(
                SleepyMover(mover, self.cycles, bed) if pool in self.sleepy else mover
                for mover in movers
            )
            for pool, movers in super()._movers(staged, stream).items()
        }


class World:
    """A worker's NSA pools on the GPU, and records in registered memory; poisoned all over."""

    def __init__(self, device: SleepyDevice) -> None:
        self.device = device
        gate = Gate()
        shape: dict[str, Any] = {
            "layer_ids": range(LAYERS),
            "num_blocks": BLOCKS,
            "block_tokens": PAGE,
        }
        self.pool = NSAPool(
            MLAPool(device, gate, latent_dim=512, row_dim=576, dtype=torch.bfloat16, **shape),
            IndexPool(
                device,
                gate,
                entries=PAGE,
                index_format=IndexFormat(key_bytes=128, scale_bytes=4),
                **shape,
            ),
        )
        self.pools = PoolSet(device, gate, [self.pool])
        self.memories = self.pools.memories()
        self.layout = self.pools.layout(PAGE)
        record_bytes = self.layout.shape().nbytes
        (region,) = divide_regions(self.layout, data_offset=0, data_bytes=SLOTS * record_bytes)
        self.host = torch.full((SLOTS * record_bytes,), poison.POISON, dtype=torch.uint8)
        device.map_host(self.host, record_bytes)
        assert device.wait_mapped(self.host)
        self.space = TransferSpace(
            self.layout, self.memories, {"full": HostRegion(region=region, data=self.host)}
        )
        self.copier = Copier(
            device,
            self.space,
            gate,
            allocator=self.pools.allocator,
            limits=CopyLimits(wait_seconds=SECONDS, copy_seconds=SECONDS),
        )
        poison.poison(self.memories)
        torch.cuda.synchronize()

    def take(self, count: int) -> list[int]:
        blocks = self.pools.allocate(count)
        assert blocks is not None
        return blocks

    def fill_records(self, slots: Sequence[int]) -> None:
        for spec in self.layout.pools:
            for layer_id in spec.layer_ids:
                rows = self.space.host_rows(spec.name, layer_id, 0)
                for slot in slots:
                    rows[slot, 0] = poison.content(
                        bytes([slot]), spec.name, layer_id, 0, spec.block_bytes
                    )

    def expected(self, pool: str, layer_id: int, slot: int) -> torch.Tensor:
        nbytes = self.layout.pool(pool).block_bytes
        return poison.content(bytes([slot]), pool, layer_id, 0, nbytes)

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        plan = plan_pages(self.layout, "full", slots, dict.fromkeys(self.pools.pools, blocks))
        return self.copier.start_loading([LoadRequest(id="a", plan=plan)])

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        plan = plan_pages(self.layout, "full", slots, dict.fromkeys(self.pools.pools, blocks))
        owned = dict.fromkeys(self.pools.pools, tuple(blocks))
        return self.copier.start_writing([StoreRequest(id="a", blocks=owned, plan=lambda: plan)])

    def close(self) -> None:
        torch.cuda.synchronize()
        assert self.copier.close(SECONDS)
        self.device.close()
        assert self.pools.allocator.num_held() == 0
        self.pools.allocator.check()
