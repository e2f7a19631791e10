"""What the GPU benchmarks share: pools on the device, registered memory, and the link's limit."""

from __future__ import annotations

import mmap
import os
import secrets
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rayhicache.core.layout import ComponentSpec, PoolSpec, RecordLayout
from rayhicache.core.plan import TransferPlan, plan_pages
from rayhicache.core.slots import Region
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.stream import CudaEvent, CudaStream
from rayhicache.device.protocols import Direction
from rayhicache.device.space import HostRegion, PoolMemory, TransferSpace
from rayhicache.device.staging import StagedPlan, Staging

PAGES = 512
PACKAGES = ("torch",)


class Rig:
    """Pools of some shape on the GPU and records of as many pages in a tmpfs file, registered.

    Args:
        pools: per pool, its name and the bytes of a block of each component.
        layers: that every pool has.
    """

    def __init__(
        self, device: CudaDevice, pools: Sequence[tuple[str, Sequence[int]]], layers: int
    ) -> None:
        self.device = device
        specs = tuple(
            PoolSpec(
                name=name,
                layer_ids=tuple(range(layers)),
                components=tuple(
                    ComponentSpec(name=str(at), block_bytes=nbytes, dtype="uint8")
                    for at, nbytes in enumerate(parts)
                ),
                block_tokens=64,
            )
            for name, parts in pools
        )
        self.layout = RecordLayout(page_tokens=64, pools=specs)
        record_bytes = self.layout.shape().nbytes
        self.host = tmpfs(PAGES * record_bytes)
        self.host[: 1 << 20].random_(0, 256)
        device.map_host(self.host, record_bytes)
        assert device.wait_mapped(self.host), "the driver refused to register the arena"
        memories = {
            spec.name: PoolMemory(
                spec=spec,
                components=tuple(
                    device.empty((layers, PAGES, part.block_bytes), torch.uint8)
                    for part in spec.components
                ),
                num_blocks=PAGES,
            )
            for spec in specs
        }
        region = Region(
            group="full", first_slot=0, num_slots=PAGES, record_bytes=record_bytes, offset=0
        )
        self.space = TransferSpace(
            self.layout, memories, {"full": HostRegion(region=region, data=self.host)}
        )
        self.nbytes = PAGES * layers * sum(spec.block_bytes for spec in specs)

    def plan(self) -> TransferPlan:
        """All pages, permuted on both sides."""
        slots, blocks = torch.randperm(PAGES).tolist(), torch.randperm(PAGES).tolist()
        names = [pool.name for pool in self.layout.pools]
        return plan_pages(self.layout, "full", slots, dict.fromkeys(names, blocks))

    def seconds(self, direction: Direction, runs: int = 9) -> float:
        """Median time of moving all pages, from making the plan until the last byte is there."""
        lane = Lane(self, direction)
        lane.move()
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            lane.move()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def close(self) -> None:
        """Unregister the memory."""
        torch.cuda.synchronize()
        self.device.unmap_host(self.host)


class Lane:
    """A copy stream with its staging, as the copier has one for each direction."""

    def __init__(self, rig: Rig, direction: Direction) -> None:
        self._device = rig.device
        self._direction = direction
        self._plan = rig.plan()
        self.stream: CudaStream = rig.device.new_stream("bench")
        self._staging = Staging(rig.device, rig.space, self.stream)

    def enqueue(self) -> StagedPlan:
        """Plan and enqueue one move of all pages."""
        staged = self._staging.move_hybrid_indices([self._plan], self._direction)
        assert staged is not None
        for _ in self._device.copy(staged, self.stream):
            pass
        return staged

    def move(self) -> None:
        """One move of all pages, until the last byte is there."""
        staged = self.enqueue()
        self.stream.stream.synchronize()
        self.retire(staged)

    def retire(self, staged: StagedPlan) -> None:
        """The move has passed."""
        self._staging.retire(staged)


class Link:
    """The limit: contiguous copies between registered memory of a tmpfs file and the device."""

    def __init__(self, nbytes: int = 2 << 30) -> None:
        self._nbytes = nbytes
        self._runtime = torch.cuda.cudart()
        self._hosts = {way: tmpfs(nbytes) for way in Direction}
        self._devices = {
            way: torch.empty(nbytes, dtype=torch.uint8, device="cuda") for way in Direction
        }
        self._streams = {way: torch.cuda.Stream() for way in Direction}
        # In one piece: a single copy mustn't span several registrations.
        for host in self._hosts.values():
            assert not int(self._runtime.cudaHostRegister(host.data_ptr(), nbytes, 1))

    def seconds_per_byte(self, way: Direction) -> float:
        """Of one copy, alone; the best of six."""
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._copy(way)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times) / self._nbytes

    def both(self, rounds: int = 6) -> dict[Direction, float]:
        """Bytes a second of each way while the other runs as well."""
        spent: dict[Direction, float] = {}
        ready = threading.Barrier(2)

        def run(way: Direction) -> None:
            ready.wait()
            start = time.perf_counter()
            for _ in range(rounds):
                self._copy(way)
            self._streams[way].synchronize()
            spent[way] = time.perf_counter() - start

        threads = [threading.Thread(target=run, args=(way,)) for way in Direction]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {way: rounds * self._nbytes / spent[way] for way in Direction}

    def copy(self, way: Direction) -> None:
        """One copy, until the last byte is there; the host asks now and then."""
        event = CudaEvent()
        self._copy(way)
        event.event.record(self._streams[way])
        event.synchronize(None)

    def _copy(self, way: Direction) -> None:
        sides = (self._devices[way], self._hosts[way])
        target, source = sides if way is Direction.LOAD else reversed(sides)
        with torch.cuda.stream(self._streams[way]):
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """Unregister the memory."""
        torch.cuda.synchronize()
        for host in self._hosts.values():
            self._runtime.cudaHostUnregister(host.data_ptr())


def hardware() -> tuple[str, str]:
    """The GPU's name, and its driver's version."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return torch.cuda.get_device_name(), told.splitlines()[0].strip()


def tmpfs(nbytes: int) -> torch.Tensor:
    """Resident memory of a file in /dev/shm, which is gone with the tensor."""
    path = Path(f"/dev/shm/rhc-bench-{secrets.token_hex(4)}")
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, nbytes)
        mapped = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)
