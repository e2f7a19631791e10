"""Ways to move the rows of one pool of one plan. The device chooses one or two per pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rayhicache.device.cuda.bulk import BulkQueue, Part, Rows
from rayhicache.device.cuda.driver import STRIDED_WORDS, Driver
from rayhicache.device.cuda.geometry import Geometry
from rayhicache.device.cuda.queue import CopyQueue
from rayhicache.device.cuda.stream import CudaEvent, CudaStream
from rayhicache.device.cuda.words import WordEvent
from rayhicache.device.protocols import Direction
from rayhicache.device.staging import StagedPlan, StagedTransfer

WORD_BYTES = 8


class Mover(Protocol):
    """Enqueues the copies of some rows of one pool. Made once per plan, on the lane's thread."""

    def after(self, event: CudaEvent) -> None:
        """Let copies enqueued from now on wait for an event that has been recorded."""

    def begin(self) -> None:
        """Enqueue what comes as a whole, before any layer's turn; doesn't wait."""

    def enqueue(self, position: int) -> WordEvent | CudaEvent:
        """Enqueue the layer at `position` of the pool's own; an event that passes once it is there.

        Called for each layer, in order. Other layers may be enqueued with it. Waits only for
        room in the hardware's queue.
        """

    def last(self) -> WordEvent | CudaEvent | None:
        """An event that passes once everything enqueued so far is there; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """Which rows of which pool a mover moves, and where they lie.

    Attributes:
        start, stop: of the transfer's rows.
        host_layers: `int64[layers]` per side, device: `Side.host_layers`.
    """

    transfer: StagedTransfer
    place: Geometry
    load: bool
    start: int
    stop: int
    host_layers: tuple[torch.Tensor, ...]

    def addresses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per side, addresses of the rows in the first layer: `int64[rows]` of host and device."""
        count = self.transfer.count
        host = self.transfer.pinned[self.start : self.stop] - self.place.first
        device = self.transfer.pinned[count + self.start : count + self.stop]
        if self.place.blocks_per_page == 1:
            slots, in_page = host * self.place.record_bytes, torch.zeros_like(host)
        else:
            blocks = self.place.blocks_per_page
            slots = torch.div(host, blocks, rounding_mode="floor") * self.place.record_bytes
            in_page = host % blocks
        return [
            (
                slots + in_page * side.nbytes + side.host,
                device * side.nbytes + side.device,
            )
            for side in self.place.sides
        ]


class BatchedMover:
    """The driver's batched copies: a call per layer and component, no SM.

    Near the link's limit for fragments of 24 KiB and more; about 0.5 us of a host thread each,
    without the GIL.
    """

    def __init__(self, queue: CopyQueue, moving: Moving) -> None:
        self._queue = queue
        self._load = moving.load
        self._count = moving.stop - moving.start
        # A layer's addresses are worked out when its turn comes: the first needn't wait for all.
        self._sides = [
            (
                side,
                *ends,
                torch.full((self._count,), side.nbytes, dtype=torch.int64),
                torch.empty((2, self._count), dtype=torch.int64),
            )
            for side, ends in zip(moving.place.sides, moving.addresses(), strict=True)
        ]

    def after(self, event: CudaEvent) -> None:
        """See `Mover.after`."""
        self._queue.wait(event)

    def begin(self) -> None:
        """See `Mover.begin`: layers come one by one."""

    def enqueue(self, position: int) -> WordEvent:
        """See `Mover.enqueue`."""
        for side, host, device, sizes, ends in self._sides:
            torch.add(host, side.host_layers[position], out=ends[0])
            torch.add(device, position * side.layer_bytes, out=ends[1])
            on_host, on_device = ends.data_ptr(), ends.data_ptr() + self._count * WORD_BYTES
            source, target = (on_host, on_device) if self._load else (on_device, on_host)
            # A record is whole before it is leased; device pages may still be written.
            self._queue.copy(target, source, sizes.data_ptr(), self._count, settled=self._load)
        return self._queue.passed()

    def last(self) -> WordEvent:
        """See `Mover.last`."""
        return self._queue.passed()


class StridedMover:
    """The driver's strided copies: each row with all its layers is one copy; no SM.

    For stores, which nobody reads layer by layer: a twentieth of the batched copies' host time.
    All layers come with the first.
    """

    def __init__(self, queue: CopyQueue, moving: Moving) -> None:
        self._queue = queue
        self._enqueued = False
        self._tables = []
        runs = moving.place.runs()
        for side, (host, device) in zip(moving.place.sides, moving.addresses(), strict=True):
            for run in runs:
                offset = side.host_layers[run.start]
                step = side.host_layers[run.start + 1] - offset if len(run) > 1 else side.nbytes
                ends = ((0, step), (0, side.layer_bytes))
                source, target = ends if moving.load else (ends[1], ends[0])
                row = Driver.strided_row(source, target, side.nbytes, len(run))
                table = torch.tensor(row, dtype=torch.int64).repeat(moving.stop - moving.start, 1)
                at_source, at_target = 1, 6
                on_host, on_device = (
                    (at_source, at_target) if moving.load else (at_target, at_source)
                )
                table[:, on_host] = host + offset
                table[:, on_device] = device + run.start * side.layer_bytes
                self._tables.append(table)

    def after(self, event: CudaEvent) -> None:
        """See `Mover.after`."""
        self._queue.wait(event)

    def begin(self) -> None:
        """See `Mover.begin`: copies wait for room, each in its turn."""

    def enqueue(self, position: int) -> WordEvent:
        """See `Mover.enqueue`."""
        if not self._enqueued:
            self._enqueued = True
            for table in self._tables:
                self._queue.copy_strided(
                    table.data_ptr(), table.shape[0], STRIDED_WORDS * WORD_BYTES
                )
        return self._queue.passed()

    def last(self) -> WordEvent:
        """See `Mover.last`."""
        return self._queue.passed()


class BulkMover:
    """A kernel of few one-warp blocks that copies through shared memory, for small fragments."""

    def __init__(self, queue: BulkQueue, moving: Moving, *, blocks: int) -> None:
        self._queue = queue
        self._moving = moving
        self._blocks = blocks
        self._events: list[WordEvent] = []

    def after(self, event: CudaEvent) -> None:
        """See `Mover.after`."""
        event.hold(self._queue.stream)

    def begin(self) -> None:
        """See `Mover.begin`: one launch for all layers."""
        place, transfer = self._moving.place, self._moving.transfer
        self._events = self._queue.launch(
            Rows(
                host_indices=transfer.host_indices[self._moving.start :].data_ptr(),
                device_indices=transfer.device_indices[self._moving.start :].data_ptr(),
                count=self._moving.stop - self._moving.start,
                layers=place.layers,
                first=place.first,
                record_bytes=place.record_bytes,
                blocks_per_page=place.blocks_per_page,
            ),
            [
                Part(
                    host=side.host,
                    device=side.device,
                    nbytes=side.nbytes,
                    layer_bytes=side.layer_bytes,
                    host_layers=offsets.data_ptr(),
                )
                for side, offsets in zip(place.sides, self._moving.host_layers, strict=True)
            ],
            load=self._moving.load,
            grid=self._blocks,
        )

    def enqueue(self, position: int) -> WordEvent:
        """See `Mover.enqueue`: it has been."""
        return self._events[position]

    def last(self) -> WordEvent | None:
        """See `Mover.last`."""
        return self._events[-1] if self._events else None


class PageableMover:
    """For memory that isn't registered: gathered by the host into pinned memory, then copied.

    Slow and right. A store waits for its bytes, since the host scatters them.
    """

    def __init__(self, staged: StagedPlan, transfer: StagedTransfer, stream: CudaStream) -> None:
        self._staged = staged
        self._transfer = transfer
        self._stream = stream
        spec = staged.space.layout.pool(transfer.pool)
        self._spec = spec
        blocks = staged.space.layout.blocks_per_page(transfer.pool)
        first = staged.space.regions[spec.group].region.first_slot * blocks
        host = transfer.pinned[: transfer.count] - first
        self._slots = torch.div(host, blocks, rounding_mode="floor")
        self._in_page = host % blocks
        self._kept: list[torch.Tensor] = []

    def after(self, event: CudaEvent) -> None:
        """See `Mover.after`."""
        self._stream.wait(event)

    def begin(self) -> None:
        """See `Mover.begin`: layers come one by one."""

    def enqueue(self, position: int) -> CudaEvent:
        """See `Mover.enqueue`; a store blocks until the layer is in host memory."""
        layer_id = self._spec.layer_ids[position]
        for number, component in enumerate(self._spec.components):
            if not component.block_bytes:
                continue
            host = self._staged.space.host_rows(self._spec.name, layer_id, number)
            device = self._staged.space.device_rows(self._spec.name, layer_id, number)
            with torch.cuda.stream(self._stream.stream):
                if self._staged.direction is Direction.LOAD:
                    rows = host[self._slots, self._in_page].pin_memory()
                    self._kept.append(rows)
                    device[self._transfer.device_indices] = rows.to(
                        device.device, non_blocking=True
                    )
                else:
                    rows = device[self._transfer.device_indices].cpu()
                    host[self._slots, self._in_page] = rows
        event = self._staged.events.take()
        self._stream.record(event)
        assert isinstance(event, CudaEvent)
        return event

    def last(self) -> None:
        """See `Mover.last`: it runs on the lane's own stream."""
        return
