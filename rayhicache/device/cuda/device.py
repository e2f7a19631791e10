"""The `cuda` device: one NVIDIA GPU.

Large fragments are moved by the copy engine, small ones by a kernel of few blocks beside it. Every
way counts up a word behind each layer, which readers' streams wait for; the lane's own stream
waits for all of them in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from rayhicache.device.cuda.bulk import BulkKernel, BulkQueue, bulk_kernel
from rayhicache.device.cuda.choice import CopyChoice
from rayhicache.device.cuda.compiling import Kernel
from rayhicache.device.cuda.digests import Digester
from rayhicache.device.cuda.driver import Driver, driver
from rayhicache.device.cuda.geometry import Geometry, geometry_of
from rayhicache.device.cuda.movers import (
    BatchedMover,
    BulkMover,
    Mover,
    Moving,
    PageableMover,
    StridedMover,
)
from rayhicache.device.cuda.paged import gather_kernel, gather_with_kernel
from rayhicache.device.cuda.queue import CopyQueue
from rayhicache.device.cuda.registration import HostRegistration, populate
from rayhicache.device.cuda.stream import CudaEvent, CudaStream
from rayhicache.device.cuda.triton_copy import TritonCopy, TritonMover, triton_copy
from rayhicache.device.cuda.words import Word, WordBoard
from rayhicache.device.digests import PageSums
from rayhicache.device.paged import PagedGather, gather_with_torch
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.space import TransferSpace
from rayhicache.device.staging import StagedPlan, StagedTransfer
from rayhicache.errors import DeviceNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """How the rows of a transfer are divided: the kernel's come first."""

    reachable: bool
    kernel_rows: int
    kernel_bytes: int
    all_bytes: int


class _Lane:
    """What one copy stream has beside itself; made when first needed, on the lane's thread."""

    def __init__(self) -> None:
        self.engine: CopyQueue | None = None
        self.kernels: list[BulkQueue] = []
        self.others: list[tuple[torch.cuda.Stream, Word]] = []


class CudaDevice:
    """A `Device` on an NVIDIA GPU.

    Args:
        index: of the GPU.
        choice: of the way to copy.

    Raises:
        DeviceNotFound: no such GPU, or no driver.
    """

    def __init__(self, index: int = 0, *, choice: CopyChoice | None = None) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise DeviceNotFound(
                asked=f"use GPU {index}",
                found=f"torch sees {torch.cuda.device_count()} GPUs",
                remedy="run on a machine with an NVIDIA GPU and driver, or use the cpu device",
            )
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._choice = choice or CopyChoice()
        self._driver: Driver = driver()
        torch.zeros(1, device=self.torch_device)  # torch's own context comes first
        self._kernel: BulkKernel | None = bulk_kernel(index)
        # Not at first use: that may be inside a graph's capture.
        self._gather: Kernel | None = gather_kernel(index)
        self._digester = Digester(self.torch_device)
        self._board = WordBoard()
        self._lock = threading.Lock()
        self._registrations: dict[int, HostRegistration] = {}
        self._lanes: dict[int, _Lane] = {}
        self._places: WeakKeyDictionary[TransferSpace, dict[str, _Place]] = WeakKeyDictionary()

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return CudaStream("current", torch.cuda.current_stream(self.torch_device))

    def capturing(self) -> bool:
        """See `Device.capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def new_stream(self, name: str) -> CudaStream:
        """See `Device.new_stream`."""
        stream = torch.cuda.Stream(self.torch_device)
        with self._lock:
            self._lanes[stream.cuda_stream] = _Lane()
        return CudaStream(name, stream)

    def new_event(self) -> CudaEvent:
        """See `Device.new_event`."""
        return CudaEvent()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.empty`."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See `Device.upload`."""
        assert isinstance(stream, CudaStream), "an upload needs a stream of this device"
        with torch.cuda.stream(stream.stream):
            return source.to(self.torch_device, non_blocking=True)

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See `Device.record_on_stream`."""
        assert isinstance(stream, CudaStream), "a record needs a stream of this device"
        tensor.record_stream(stream.stream)

    def map_host(self, data: torch.Tensor, record_bytes: int) -> None:
        """See `Device.map_host`: registers the memory with the driver, in the background."""
        runtime = torch.cuda.cudart()

        def register(address: int, nbytes: int) -> int:
            populate(address, nbytes)
            return int(runtime.cudaHostRegister(address, nbytes, 0))

        registration = HostRegistration(
            data.data_ptr(),
            data.numel(),
            record_bytes,
            register=register,
            unregister=lambda address: int(runtime.cudaHostUnregister(address)),
        )
        with self._lock:
            self._registrations[data.data_ptr()] = registration

    def wait_mapped(self, data: torch.Tensor, timeout: float | None = None) -> bool:
        """Block until the memory is registered; False if it isn't, or not in time."""
        return self._registrations[data.data_ptr()].wait(timeout)

    def unmap_host(self, data: torch.Tensor) -> None:
        """See `Device.unmap_host`."""
        with self._lock:
            registration = self._registrations.pop(data.data_ptr(), None)
        if registration is not None:
            registration.close()

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """See `Device.copy`."""
        torch.cuda.set_device(self.torch_device)
        assert isinstance(stream, CudaStream), "a copy needs a stream of this device"
        movers = self._movers(staged, stream)
        start = staged.events.take()
        assert isinstance(start, CudaEvent)
        stream.record(start)
        for mine in movers.values():
            for mover in mine:
                mover.after(start)
        try:
            # The kernel's pools first: their launch takes microseconds, the others wait for room.
            for mine in movers.values():
                for mover in mine:
                    mover.begin()
            for layer_id, transfers in staged.layers():
                for transfer in transfers:
                    position = self._place(staged.space, transfer.pool).positions[layer_id]
                    events = [mover.enqueue(position) for mover in movers[transfer.pool]]
                    yield Landing(layer_id=layer_id, pools=(transfer.pool,), events=tuple(events))
        finally:
            # Also when the caller stops early: the lane's finish event covers all copies.
            for mine in movers.values():
                for mover in mine:
                    if (last := mover.last()) is not None:
                        stream.wait(last)

    def digests(self, staged: StagedPlan, stream: Stream) -> PageSums:
        """See `Device.digests`; on a stream beside the copies."""
        assert isinstance(stream, CudaStream), "digests need a stream of this device"
        return self._digester.digest(staged, stream)

    def gather(self, gather: PagedGather) -> tuple[torch.Tensor, ...]:
        """See `Device.gather`; waits for the GPU where NVIDIA's compiler package is missing."""
        if self._gather is None:
            return gather_with_torch(gather)
        return gather_with_kernel(self._gather, gather)

    def close(self) -> None:
        """See `Device.close`."""
        with self._lock:
            registrations, self._registrations = self._registrations, {}
        for registration in registrations.values():
            registration.close()

    def _movers(self, staged: StagedPlan, stream: CudaStream) -> dict[str, tuple[Mover, ...]]:
        """The ways that each pool of a plan takes."""
        lane = self._lanes[stream.stream.cuda_stream]
        shares = {t.pool: self._share(staged, t) for t in staged.transfers}
        all_bytes = sum(share.all_bytes for share in shares.values())
        kernel_bytes = sum(share.kernel_bytes for share in shares.values())
        blocks = self._choice.blocks(kernel_bytes, max(all_bytes, 1))
        movers: dict[str, tuple[Mover, ...]] = {}
        kernels = 0
        for transfer in staged.transfers:
            share, mine = shares[transfer.pool], list[Mover]()
            if share.all_bytes and not share.reachable:
                mine.append(PageableMover(staged, transfer, stream))
            elif share.all_bytes:
                rows = share.kernel_rows
                if rows:
                    # Pools side by side, each on a stream of its own: layer by layer all of them.
                    grid = max(round(blocks * share.kernel_bytes / kernel_bytes), 1)
                    moving = self._moving(staged, transfer, 0, rows)
                    mine.append(self._kernel_mover(lane, kernels, moving, grid))
                    kernels += 1
                if rows < transfer.count:
                    rest = self._moving(staged, transfer, rows, transfer.count)
                    strided = not rest.load and self._strided(rest.place)
                    way = StridedMover if strided else BatchedMover
                    mine.append(way(self._engine_queue(lane), rest))
            movers[transfer.pool] = tuple(mine)
        return movers

    def _share(self, staged: StagedPlan, transfer: StagedTransfer) -> _Share:
        """How the rows of a transfer are divided."""
        place = self._place(staged.space, transfer.pool)
        sizes, layers = place.geometry.sizes, place.geometry.layers
        if not transfer.count or not sizes:
            return _Share(reachable=True, kernel_rows=0, kernel_bytes=0, all_bytes=0)
        kernel = self._bulk_moves(sizes, layers) or self._triton() is not None
        reachable = (
            self._driver.can_wait
            and (kernel or self._driver.can_batch)
            and self._reachable(staged, transfer)
        )
        rows = self._choice.kernel_rows(staged.direction, min(sizes), transfer.count)
        if not self._driver.can_batch:
            rows = transfer.count
        if not reachable or not kernel:
            rows = 0
        row_bytes = sum(sizes) * layers
        return _Share(
            reachable=reachable and (kernel or self._driver.can_batch),
            kernel_rows=rows,
            kernel_bytes=rows * row_bytes,
            all_bytes=transfer.count * row_bytes,
        )

    def _strided(self, place: Geometry) -> bool:
        return self._driver.can_stride and min(place.sizes) >= self._choice.strided_from

    def _moving(
        self, staged: StagedPlan, transfer: StagedTransfer, start: int, stop: int
    ) -> Moving:
        place = self._place(staged.space, transfer.pool)
        return Moving(
            transfer=transfer,
            place=place.geometry,
            load=staged.direction is Direction.LOAD,
            start=start,
            stop=stop,
            host_layers=place.host_layers,
        )

    def _place(self, space: TransferSpace, pool: str) -> _Place:
        """Addresses of a pool; worked out once."""
        with self._lock:
            known = self._places.setdefault(space, {})
        if pool not in known:
            geometry = geometry_of(space, pool)
            # On a stream of its own: the current one may have a forward's work before it.
            with torch.cuda.stream(torch.cuda.Stream(self.torch_device)):
                known[pool] = _Place(
                    geometry=geometry,
                    positions={i: at for at, i in enumerate(space.layout.pool(pool).layer_ids)},
                    host_layers=tuple(
                        torch.tensor(side.host_layers, dtype=torch.int64).to(self.torch_device)
                        for side in geometry.sides
                    ),
                )
        return known[pool]

    def _engine_queue(self, lane: _Lane) -> CopyQueue:
        if lane.engine is None:
            lane.engine = CopyQueue(
                self._driver, torch.cuda.Stream(self.torch_device), self._board.new_word()
            )
        return lane.engine

    def _bulk_moves(self, sizes: list[int], layers: int) -> bool:
        return self._kernel is not None and self._kernel.can_move(sizes, layers)

    def _triton(self) -> TritonCopy | None:
        """For GPUs before Hopper, and fragments that the bulk kernel can't move."""
        return triton_copy(self._index)

    def _kernel_mover(self, lane: _Lane, number: int, moving: Moving, blocks: int) -> Mover:
        if self._bulk_moves(moving.place.sizes, moving.place.layers):
            return BulkMover(self._kernel_queue(lane, number), moving, blocks=blocks)
        copy = self._triton()
        assert copy is not None, "rows are given to a kernel where there is one"
        while len(lane.others) <= number:
            stream = torch.cuda.Stream(self.torch_device)
            lane.others.append((stream, self._board.new_word()))
        stream, word = lane.others[number]
        return TritonMover(copy, self._driver, stream, word, moving, blocks=2 * blocks)

    def _kernel_queue(self, lane: _Lane, number: int) -> BulkQueue:
        assert self._kernel is not None
        while len(lane.kernels) <= number:
            stream = torch.cuda.Stream(self.torch_device)
            lane.kernels.append(self._kernel.new_queue(stream, self._board.new_word()))
        return lane.kernels[number]

    def _reachable(self, staged: StagedPlan, transfer: StagedTransfer) -> bool:
        """Whether the GPU can reach every record of the transfer: its memory is registered."""
        group = staged.space.layout.pool(transfer.pool).group
        host = staged.space.regions[group]
        registration = self._registrations.get(host.data.data_ptr())
        if registration is None:
            return host.data.is_pinned()
        if registration.ready_bytes == host.data.numel():
            return True
        blocks = staged.space.layout.blocks_per_page(transfer.pool)
        last = int(transfer.pinned[: transfer.count].max()) // blocks - host.region.first_slot
        return (last + 1) * host.region.record_bytes <= registration.ready_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A pool's addresses; `host_layers` as `Moving` has them, positions by layer id."""

    geometry: Geometry
    positions: dict[int, int]
    host_layers: tuple[torch.Tensor, ...]
