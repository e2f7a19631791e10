"""The copier: two lanes, one for loads and one for stores, each a stream and two threads.

    engine thread ──ticket──► planner: stages, fences, records, enqueues layer by layer
                                 │ finish event
                                 ▼
                              finisher: waits for it as the host, then closes the ticket

The engine's thread only checks a plan and opens a ticket. Nothing depends on the engine calling
again: the finisher closes tickets by itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rayhicache.core.plan import Indices, TransferPlan, check_plan, merge_plans
from rayhicache.device.counter import LayerTransferCounter
from rayhicache.device.gate import Gate
from rayhicache.device.lane import Job, Lane
from rayhicache.device.limits import CopyLimits
from rayhicache.device.pages import PageAllocator
from rayhicache.device.protocols import Device, Direction, Event
from rayhicache.device.space import TransferSpace
from rayhicache.device.ticket import Ticket
from rayhicache.errors import RayHiCacheError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request's load; its plan is known."""

    id: str
    plan: TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """One request's store.

    Attributes:
        id: of the request.
        blocks: per pool, the device blocks that it reads.
        plan: called on the lane's thread to reserve slots; None when nothing is to be stored.
    """

    id: str
    blocks: Mapping[str, Indices]
    plan: Callable[[], TransferPlan | None]


class Copier:
    """Moves pages between a worker's pools and its node's arena.

    `start_loading` and `start_writing` may be called from any thread; callbacks of tickets run
    on the lanes' threads.

    Args:
        allocator: of the pools' blocks, to hold them and to fence loads; None when the engine
            keeps its own and passes the events to wait for as `after`.
    """

    def __init__(
        self,
        device: Device,
        space: TransferSpace,
        gate: Gate,
        *,
        allocator: PageAllocator | None = None,
        limits: CopyLimits | None = None,
    ) -> None:
        self._device = device
        self._space = space
        self._gate = gate
        self._allocator = allocator
        self._limits = limits or CopyLimits()
        self._ids = itertools.count(1)
        self._lanes = {
            direction: Lane(device, space, direction, self._limits, self._retire)
            for direction in Direction
        }

    def start_loading(
        self,
        requests: Sequence[LoadRequest],
        *,
        after: Sequence[Event] = (),
        prepare: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Start one load for a batch: layer 0 of every request before layer 1 of any.

        Doesn't block, but for back-pressure. The loaded blocks belong to the ticket until it
        closes. Readers need no ticket: they bind the blocks.

        Args:
            after: further events that the copies wait for.
            prepare: called with the ticket before it starts, to add callbacks.

        Raises:
            InvalidPlan: before anything is changed.
            PageBusy: an open ticket owns one of the blocks.
            QueueFull: too many tickets stayed open.
            TierClosed: after `close`.
        """
        plans = [request.plan for request in requests]
        limits = self._space.limits()
        for plan in plans:
            check_plan(plan, self._space.layout, limits)
        blocks = {t.pool: t.device_indices or () for t in merge_plans(plans, self._space.layout)}
        return self._start(Direction.LOAD, requests, blocks, lambda: plans, tuple(after), prepare)

    def start_writing(
        self,
        requests: Sequence[StoreRequest],
        *,
        prepare: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Start one store for a batch. Its copies wait for the caller's current stream.

        Doesn't block, but for back-pressure. The stored blocks belong to the ticket until it
        closes: freed ones are reused only then.

        Raises:
            PageBusy: a load is filling one of the blocks.
            QueueFull, TierClosed: as `start_loading`.
        """
        event = self._device.new_event()
        self._device.current_stream().record(event)
        blocks: dict[str, Indices] = {}
        for request in requests:
            for pool, indices in request.blocks.items():
                blocks[pool] = (*blocks.get(pool, ()), *indices)

        def plans() -> list[TransferPlan]:
            return [plan for request in requests if (plan := request.plan()) is not None]

        return self._start(Direction.STORE, requests, blocks, plans, (event,), prepare)

    def num_open(self) -> int:
        """Tickets that have not closed."""
        return sum(lane.num_open() for lane in self._lanes.values())

    def close(self, timeout: float = 30.0) -> bool:
        """Take no more, cancel what has not started, wait for what has; False on time-out.

        Idempotent.
        """
        deadline = time.monotonic() + timeout
        for lane in self._lanes.values():
            lane.stop()
        return all(
            [lane.join(max(deadline - time.monotonic(), 0)) for lane in self._lanes.values()]
        )

    def _start(
        self,
        direction: Direction,
        requests: Sequence[LoadRequest] | Sequence[StoreRequest],
        blocks: Mapping[str, Indices],
        plans: Callable[[], list[TransferPlan]],
        after: tuple[Event, ...],
        prepare: Callable[[Ticket], None] | None,
    ) -> Ticket:
        names = tuple(request.id for request in requests)
        number = next(self._ids)
        expected = {p: self._space.layout.pool(p).layer_ids for p in blocks if blocks[p]}
        counter = LayerTransferCounter(
            self._device,
            expected,
            requests=names,
            ticket=number,
            wait_seconds=self._limits.wait_seconds,
        )
        ticket = Ticket(
            id=number, direction=direction, requests=names, blocks=blocks, counter=counter
        )
        if prepare is not None:
            prepare(ticket)
        lane = self._lanes[direction]
        lane.admit(names)
        try:
            self._gate.open(ticket)
        except RayHiCacheError:
            lane.dismiss()
            raise
        fences = list(after)
        if self._allocator is not None:
            self._allocator.hold(ticket.all_blocks)
            if direction is Direction.LOAD:
                fences += self._allocator.fences(ticket.all_blocks)
        lane.put(Job(ticket=ticket, plans=plans, fences=tuple(fences)))
        return ticket

    def _retire(self, ticket: Ticket, *, failed: bool) -> None:
        self._gate.close(ticket, failed=failed)
        if self._allocator is not None:
            self._allocator.unhold(ticket.all_blocks)
