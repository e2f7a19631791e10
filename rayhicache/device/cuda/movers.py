"""Ways to move one pool of one plan, a layer at a time. The device chooses one per pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rayhicache.device.cuda.bulk import BulkKernel, Rows, Side
from rayhicache.device.cuda.driver import Driver
from rayhicache.device.protocols import Direction
from rayhicache.device.staging import StagedPlan, StagedTransfer


class Mover(Protocol):
    """Enqueues the copies of one pool. Made once per plan, on the lane's thread.

    Attributes:
        beside: it runs on the second stream, beside the copy engine.
    """

    beside: bool

    def enqueue(self, position: int, stream: torch.cuda.Stream) -> None:
        """Enqueue the layer at `position` of the pool's own layers. Doesn't block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One component of a transfer, as addresses.

    Attributes:
        host, device: address of row 0 of the pool's first layer.
        host_layers: per layer, its offset from the first one's rows in a record.
        device_layer_bytes: from one layer to the next.
        nbytes: of a block.
    """

    host: int
    device: int
    host_layers: tuple[int, ...]
    device_layer_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where the rows of one transfer lie.

    Attributes:
        parts: its components that have bytes.
        record_bytes: from one slot to the next.
        blocks: of a page.
        first: host index of the region's first row.
    """

    parts: tuple[Part, ...]
    record_bytes: int
    blocks: int
    first: int


def geometry(staged: StagedPlan, transfer: StagedTransfer) -> Geometry:
    """Addresses of both sides of a pool."""
    space = staged.space
    spec = space.layout.pool(transfer.pool)
    blocks = space.layout.blocks_per_page(transfer.pool)
    region = space.regions[spec.group].region
    parts = []
    for number, component in enumerate(spec.components):
        if not component.block_bytes:
            continue
        hosts = [space.host_rows(spec.name, i, number).data_ptr() for i in spec.layer_ids]
        memory = space.pools[spec.name].components[number]
        parts.append(
            Part(
                host=hosts[0],
                device=memory.data_ptr(),
                host_layers=tuple(host - hosts[0] for host in hosts),
                device_layer_bytes=memory.stride(0),
                nbytes=component.block_bytes,
            )
        )
    return Geometry(
        parts=tuple(parts),
        record_bytes=region.record_bytes,
        blocks=blocks,
        first=region.first_slot * blocks,
    )


class BatchedMover:
    """The driver's batched copies: one call per layer and component, no SM.

    Near the link's limit for fragments of 24 KiB and more; about 1 us of a host thread each,
    without the GIL. Moves the rows from `start` on.
    """

    beside = False

    def __init__(
        self, driver: Driver, staged: StagedPlan, transfer: StagedTransfer, *, start: int
    ) -> None:
        place = geometry(staged, transfer)
        self._driver = driver
        self._count = transfer.count - start
        self._load = staged.direction is Direction.LOAD
        host = transfer.pinned[start : transfer.count] - place.first
        device = transfer.pinned[transfer.count + start :]
        slots = torch.div(host, place.blocks, rounding_mode="floor") * place.record_bytes
        in_page = host % place.blocks
        # All addresses of all layers at once; a layer's call then only needs a pointer.
        self._tables = []
        for part in place.parts:
            layers = torch.arange(len(part.host_layers)).unsqueeze(1)
            offsets = torch.tensor(part.host_layers, dtype=torch.int64).unsqueeze(1)
            self._tables.append(
                (
                    part.host + offsets + (slots + in_page * part.nbytes),
                    part.device + layers * part.device_layer_bytes + device * part.nbytes,
                    torch.full((self._count,), part.nbytes, dtype=torch.int64),
                )
            )

    def enqueue(self, position: int, stream: torch.cuda.Stream) -> None:
        """See `Mover.enqueue`."""
        row = position * self._count * 8
        for host, device, sizes in self._tables:
            sources, targets = (host, device) if self._load else (device, host)
            self._driver.copy_batch(
                targets.data_ptr() + row,
                sources.data_ptr() + row,
                sizes.data_ptr(),
                self._count,
                stream,
            )


class BulkMover:
    """A kernel of few one-warp blocks that copies through shared memory, for small fragments.

    Moves the rows before `stop`.
    """

    beside = True

    def __init__(
        self,
        kernel: BulkKernel,
        staged: StagedPlan,
        transfer: StagedTransfer,
        *,
        blocks: int,
        stop: int,
    ) -> None:
        place = geometry(staged, transfer)
        self._kernel = kernel
        self._parts = place.parts
        self._rows = Rows(stop, place.record_bytes, place.blocks, place.first)
        self._transfer = transfer
        self._load = staged.direction is Direction.LOAD
        self._blocks = blocks

    def enqueue(self, position: int, stream: torch.cuda.Stream) -> None:
        """See `Mover.enqueue`; two components a launch."""
        sides = [
            Side(
                part.host + part.host_layers[position],
                part.device + position * part.device_layer_bytes,
                part.nbytes,
            )
            for part in self._parts
        ]
        for at in range(0, len(sides), 2):
            self._kernel.launch(
                self._transfer.host_indices,
                self._transfer.device_indices,
                sides[at : at + 2],
                self._rows,
                load=self._load,
                grid=self._blocks,
                stream=stream,
            )


class PageableMover:
    """For memory that isn't registered: gathered by the host into pinned memory, then copied.

    Slow and right. A store waits for its bytes, since the host scatters them.
    """

    beside = False

    def __init__(self, staged: StagedPlan, transfer: StagedTransfer) -> None:
        self._staged = staged
        self._transfer = transfer
        spec = staged.space.layout.pool(transfer.pool)
        self._spec = spec
        self._blocks = staged.space.layout.blocks_per_page(transfer.pool)
        first = staged.space.regions[spec.group].region.first_slot * self._blocks
        host = transfer.pinned[: transfer.count] - first
        self._slots = torch.div(host, self._blocks, rounding_mode="floor")
        self._in_page = host % self._blocks
        self._kept: list[torch.Tensor] = []

    def enqueue(self, position: int, stream: torch.cuda.Stream) -> None:
        """See `Mover.enqueue`; a store blocks until the layer is in host memory."""
        layer_id = self._spec.layer_ids[position]
        for number, component in enumerate(self._spec.components):
            if not component.block_bytes:
                continue
            host = self._staged.space.host_rows(self._spec.name, layer_id, number)
            device = self._staged.space.device_rows(self._spec.name, layer_id, number)
            with torch.cuda.stream(stream):
                if self._staged.direction is Direction.LOAD:
                    rows = host[self._slots, self._in_page].pin_memory()
                    self._kept.append(rows)
                    device[self._transfer.device_indices] = rows.to(
                        device.device, non_blocking=True
                    )
                else:
                    rows = device[self._transfer.device_indices].cpu()
                    host[self._slots, self._in_page] = rows
