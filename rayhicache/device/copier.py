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
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayhicache.core.plan import Indices, TransferPlan, check_plan, merge_plans
from rayhicache.device.counter import LayerTransferCounter
from rayhicache.device.gate import Gate
from rayhicache.device.pages import PageAllocator
from rayhicache.device.protocols import Device, Direction, Event
from rayhicache.device.space import TransferSpace
from rayhicache.device.staging import StagedPlan, Staging
from rayhicache.device.ticket import Ticket, TicketState
from rayhicache.errors import QueueFull, RayHiCacheError, TierClosed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Limits of the copier.

    Attributes:
        tickets_max: open tickets a lane; the next one waits for room.
        submit_seconds: how long it waits.
        wait_seconds: how long a reader may block for a layer that isn't enqueued.
        copy_seconds: after this a copy is given up; its pages stay sealed until it has passed.
        ring_indices: indices that the pinned ring holds.
    """

    tickets_max: int = 64
    submit_seconds: float = 10.0
    wait_seconds: float = 30.0
    copy_seconds: float = 60.0
    ring_indices: int = 1 << 16


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    ticket: Ticket
    plans: Callable[[], list[TransferPlan]]
    fences: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """Keeps everything that enqueued copies read alive until their finish event."""

    job: _Job
    staged: StagedPlan | None
    finish: Event


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
            direction: _Lane(device, space, direction, self._limits, self._retire)
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
            owned = frozenset().union(*ticket.blocks.values())
            self._allocator.hold(owned)
            if direction is Direction.LOAD:
                fences += self._allocator.fences(owned)
        lane.put(_Job(ticket=ticket, plans=plans, fences=tuple(fences)))
        return ticket

    def _retire(self, ticket: Ticket, *, failed: bool) -> None:
        self._gate.close(ticket, failed=failed)
        if self._allocator is not None:
            self._allocator.unhold(frozenset().union(*ticket.blocks.values()))


class _Retire(Protocol):
    def __call__(self, ticket: Ticket, *, failed: bool) -> None: ...


class _Lane:
    """One direction: its stream, its planner thread and its finisher thread."""

    def __init__(
        self,
        device: Device,
        space: TransferSpace,
        direction: Direction,
        limits: CopyLimits,
        retire: _Retire,
    ) -> None:
        self._device = device
        self._direction = direction
        self._limits = limits
        self._retire = retire
        self.stream = device.new_stream(direction.value)
        self._staging = Staging(
            device,
            space,
            self.stream,
            ring_indices=limits.ring_indices,
            timeout=limits.copy_seconds,
        )
        self._room = threading.BoundedSemaphore(limits.tickets_max)
        self._open = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._flights: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"{direction.value}-{name}", daemon=True)
            for name, run in (("planner", self._plan), ("finisher", self._finish))
        ]
        for thread in self._threads:
            thread.start()

    def admit(self, requests: tuple[str, ...]) -> None:
        """Wait for room for one more ticket."""
        if self._stopped:
            raise TierClosed(
                asked=f"start a {self._direction.value} for {requests}",
                found="the copier is closed",
                remedy="make a new client",
            )
        if not self._room.acquire(timeout=self._limits.submit_seconds):
            raise QueueFull(
                asked=f"start a {self._direction.value} for {requests}",
                found=f"{self._limits.tickets_max} tickets stayed open for "
                f"{self._limits.submit_seconds} s",
                remedy="see which copy stream hangs, or raise tickets_max",
            )
        with self._lock:
            self._open += 1

    def dismiss(self) -> None:
        """The admitted ticket didn't start, or has closed."""
        with self._lock:
            self._open -= 1
        self._room.release()

    def put(self, job: _Job) -> None:
        """Hand an admitted ticket to the planner; one that came too late is cancelled."""
        with self._lock:
            if not self._stopped:
                self._jobs.put(job)
                return
        job.ticket.counter.fail("the copier was closed", None)
        self._close(job.ticket, "the copier was closed")

    def num_open(self) -> int:
        """Tickets admitted and not closed."""
        with self._lock:
            return self._open

    def stop(self) -> None:
        """Admit no more; what is queued is cancelled."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Wait until both threads have ended."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _plan(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._stopped:
                job.ticket.cancel()
            self._flights.put(self._enqueue(job))
        self._flights.put(None)

    def _enqueue(self, job: _Job) -> _InFlight:
        """Enqueue one ticket's copies. Whatever fails fails the ticket, never the lane."""
        staged: StagedPlan | None = None
        cause = "cancelled" if job.ticket.cancelled else ""
        finish = self._device.new_event()
        try:
            if not cause:
                staged = self._staging.move_hybrid_indices(job.plans(), self._direction)
            if staged is not None:
                cause = self._copy(job, staged)
            self.stream.record(finish)
        except (RayHiCacheError, RuntimeError) as fault:
            log.warning("ticket %d failed: %s", job.ticket.id, fault)
            cause = str(fault)
            self.stream.record(finish)
        if cause or staged is None:
            job.ticket.counter.fail(cause or "nothing to move", finish)
        if cause:
            job.ticket.seal(cause)
        return _InFlight(job=job, staged=staged, finish=finish)

    def _copy(self, job: _Job, staged: StagedPlan) -> str:
        for fence in job.fences:
            self.stream.wait(fence)
        self._staging.record_transfer_indices_on_stream(
            self.stream, staged.host_indices, staged.device_indices, staged.pool_transfers
        )
        for landing in self._device.copy(staged, self.stream):
            job.ticket.counter.recorded(landing.layer_id, landing.pools, landing.events)
            if job.ticket.cancelled:
                return "cancelled"
        return ""

    def _finish(self) -> None:
        while (flight := self._flights.get()) is not None:
            ticket = flight.job.ticket
            cause = self._await(flight)
            if flight.staged is not None:
                ticket.counter.done()
                self._staging.retire(flight.staged)
            self._close(ticket, cause)

    def _close(self, ticket: Ticket, cause: str) -> None:
        failed = bool(cause) or ticket.state is TicketState.SEALED
        self._retire(ticket, failed=failed)
        ticket.close(cause)
        self.dismiss()

    def _await(self, flight: _InFlight) -> str:
        """Wait as the host until no copy of the ticket can land; why it failed, or nothing."""
        ticket = flight.job.ticket
        try:
            if not flight.finish.synchronize(self._limits.copy_seconds):
                cause = f"its copies weren't done after {self._limits.copy_seconds} s"
                ticket.counter.fail(cause, flight.finish)
                ticket.seal(cause)
                flight.finish.synchronize(None)
        except RuntimeError as fault:
            ticket.counter.revoke(str(fault))
            return str(fault)
        return ""
