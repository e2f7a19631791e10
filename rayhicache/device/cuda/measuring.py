"""Measure the ways to copy on this machine's GPU: what `rayhicache bench` runs, about a minute."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from rayhicache.core.layout import ComponentSpec, PoolSpec, RecordLayout
from rayhicache.core.plan import plan_pages
from rayhicache.core.slots import Region
from rayhicache.device.cuda.bulk import bulk_kernel
from rayhicache.device.cuda.choice import CopyChoice
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.tuning import ALL_BYTES, Point, best, choice_of
from rayhicache.device.protocols import Direction
from rayhicache.device.space import HostRegion, PoolMemory, TransferSpace
from rayhicache.device.staging import Staging

PAGES = 512
MOVE_BYTES = 256 << 20
KIB = 1 << 10
SIZES = tuple(kib * KIB for kib in (4, 8, 16, 24, 32, 48, 64, 128, 256))
KERNEL_SHARES = (0.0, 0.2, 0.4, 0.6, 1.0)
BLOCKS = (4, 8, 16, 32)
PRODUCT = (1536, 2816, 8192)  # of all that were tried, the one that copies slow down the most
PRODUCT_SECONDS = 0.05
RUNS = 5


class Bench:
    """The measurements on one GPU.

    Args:
        index: of the GPU.

    Raises:
        DeviceNotFound: no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._device = CudaDevice(index, choice=CopyChoice(load=(), store=()))
        torch.cuda.set_device(index)
        self._devices: dict[CopyChoice, CudaDevice] = {}
        self._has_kernel = bulk_kernel(index) is not None
        self._limits = {way: self._link_seconds_per_byte(way) for way in Direction}
        place = self._device.torch_device
        m, n, k = PRODUCT
        self._a = torch.randn(m, k, device=place, dtype=torch.bfloat16)
        self._b = torch.randn(k, n, device=place, dtype=torch.bfloat16)
        self._product_seconds(20)
        self._count = max(int(PRODUCT_SECONDS / self._product_seconds(20)), 5)

    def run(self) -> tuple[list[Point], CopyChoice]:
        """All points, and the table that they make."""
        blocks = CopyChoice()
        if self._has_kernel:
            more = [replace(blocks, blocks_alone=number) for number in BLOCKS]
            blocks = self._best_of(Direction.LOAD, 8 * KIB, 1.0, more)
            more = [replace(blocks, blocks_beside=number) for number in BLOCKS]
            blocks = self._best_of(Direction.STORE, 32 * KIB, 0.4, more)
        shares = KERNEL_SHARES if self._has_kernel else (0.0,)
        points: list[Point] = []
        for nbytes in SIZES:
            rig = _Rig(self._device, nbytes)
            points += [
                self._point(rig, direction, share, blocks)
                for direction in Direction
                for share in shares
            ]
        made = choice_of(
            points, blocks_beside=blocks.blocks_beside, blocks_alone=blocks.blocks_alone
        )
        return points, made

    def close(self) -> None:
        """Let the GPU go."""
        torch.cuda.synchronize(self._device.torch_device)
        self._close_devices()
        self._device.close()

    def _best_of(
        self, direction: Direction, nbytes: int, share: float, choices: Sequence[CopyChoice]
    ) -> CopyChoice:
        """The one with the shortest forward; of those alike the first."""
        rig = _Rig(self._device, nbytes)
        points = [self._point(rig, direction, share, choice) for choice in choices]
        self._close_devices()
        return choices[points.index(best(points))]

    def _point(self, rig: _Rig, direction: Direction, share: float, blocks: CopyChoice) -> Point:
        rows = ((ALL_BYTES, share),) if share else ()
        lane = _Lane(self._device_of(replace(blocks, load=rows, store=rows)), rig, direction)
        lane.move()
        times = [_seconds(lane.move) for _ in range(RUNS)]
        alone = self._product_seconds(self._count)
        beside = self._beside(lane)
        torch.cuda.synchronize(self._device.torch_device)
        return Point(
            direction=direction,
            fragment_bytes=rig.fragment_bytes,
            kernel_share=share,
            copy_seconds=statistics.median(times),
            limit_seconds=self._limits[direction] * rig.moved_bytes,
            slowdown=max(beside / alone, 1.0),
            moved_bytes=rig.moved_bytes,
        )

    def _device_of(self, choice: CopyChoice) -> CudaDevice:
        """One device for each choice: making one takes longer than a measurement."""
        if choice not in self._devices:
            self._devices[choice] = CudaDevice(self._index, choice=choice)
        return self._devices[choice]

    def _close_devices(self) -> None:
        """Give back what the devices of choices took of the GPU's memory."""
        while self._devices:
            self._devices.popitem()[1].close()

    def _beside(self, lane: _Lane) -> float:
        """Time of one product while another thread moves all the time."""
        moving, done = threading.Event(), threading.Event()

        def move() -> None:
            try:
                while not done.is_set():
                    lane.move()
                    moving.set()
            finally:
                moving.set()

        with ThreadPoolExecutor(max_workers=1) as threads:
            mover = threads.submit(move)
            try:
                moving.wait()
                seconds = self._product_seconds(self._count)
            finally:
                done.set()
            mover.result()
        return seconds

    def _product_seconds(self, count: int) -> float:
        """Time of one product, over `count` in a row, by the GPU's own clock."""
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(count):
            torch.matmul(self._a, self._b)
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3 / count

    def _link_seconds_per_byte(self, direction: Direction) -> float:
        """The link's limit: one contiguous copy between pinned memory and the device."""
        host = self._device.pinned((MOVE_BYTES,), torch.uint8)
        device = self._device.empty((MOVE_BYTES,), torch.uint8)
        load = direction is Direction.LOAD
        target, source = (device, host) if load else (host, device)

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(self._device.torch_device)

        copy()
        return min(_seconds(copy) for _ in range(2 * RUNS)) / MOVE_BYTES


class _Rig:
    """One pool of one fragment size, on the device and in pinned memory."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        layers = max(MOVE_BYTES // (PAGES * nbytes), 2)
        part = ComponentSpec(name="rows", block_bytes=nbytes, dtype="uint8")
        spec = PoolSpec(
            name="rows", layer_ids=tuple(range(layers)), components=(part,), block_tokens=64
        )
        layout = RecordLayout(page_tokens=64, pools=(spec,))
        record_bytes = layout.shape().nbytes
        memory = PoolMemory(
            spec=spec,
            components=(device.empty((layers, PAGES, nbytes), torch.uint8),),
            num_blocks=PAGES,
        )
        region = Region(
            group="full", first_slot=0, num_slots=PAGES, record_bytes=record_bytes, offset=0
        )
        data = device.pinned((PAGES * record_bytes,), torch.uint8)
        self.fragment_bytes = nbytes
        self.moved_bytes = PAGES * layers * nbytes
        self.space = TransferSpace(
            layout, {"rows": memory}, {"full": HostRegion(region=region, data=data)}
        )
        # Permuted on both sides, as pages are after a while.
        slots, blocks = torch.randperm(PAGES).tolist(), torch.randperm(PAGES).tolist()
        self.plan = plan_pages(layout, "full", slots, {"rows": blocks})


class _Lane:
    """A copy stream with its staging, as the copier has one for each direction."""

    def __init__(self, device: CudaDevice, rig: _Rig, direction: Direction) -> None:
        self._device = device
        self._plan = rig.plan
        self._direction = direction
        self._stream = device.new_stream("bench")
        self._staging = Staging(device, rig.space, self._stream)

    def move(self) -> None:
        """Move all pages, from the plan until the last byte is there."""
        staged = self._staging.move_hybrid_indices([self._plan], self._direction)
        assert staged is not None
        for _ in self._device.copy(staged, self._stream):
            pass
        self._stream.stream.synchronize()
        self._staging.retire(staged)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
