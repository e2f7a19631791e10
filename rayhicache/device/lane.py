"""One lane of the copier: a copy stream, the thread that enqueues on it and the one that waits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rayhicache.core.plan import TransferPlan, merge_plans
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Device, Direction, Event
from rayhicache.device.space import TransferSpace
from rayhicache.device.staging import StagedPlan, Staging
from rayhicache.device.ticket import Ticket, TicketState
from rayhicache.errors import InvalidPlan, QueueFull, TierClosed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An admitted ticket on its way to the planner."""

    ticket: Ticket
    plans: Callable[[], list[TransferPlan]]
    fences: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """Keeps everything that enqueued copies read alive until their finish event."""

    job: Job
    staged: StagedPlan | None
    finish: Event


class _Retire(Protocol):
    def __call__(self, ticket: Ticket, *, failed: bool) -> None: ...


class Lane:
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
        self._space = space
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
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
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

    def put(self, job: Job) -> None:
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

    def _enqueue(self, job: Job) -> _InFlight:
        """Enqueue one ticket's copies. Whatever fails fails the ticket, never the lane."""
        staged: StagedPlan | None = None
        cause = "cancelled" if job.ticket.cancelled else ""
        finish = self._device.new_event()
        try:
            if not cause:
                plans = job.plans()
                self._check_owned(job.ticket, plans)
                staged = self._staging.move_hybrid_indices(plans, self._direction)
            if staged is not None:
                cause = self._copy(job, staged)
            self.stream.record(finish)
        except BaseException as fault:
            job.ticket.fault = fault
            log.warning("ticket %d failed", job.ticket.id, exc_info=fault)
            cause = str(fault) or type(fault).__name__
            self.stream.record(finish)
        # Sealed first: whoever then gets `LoadFailed` may compute into the same blocks at once.
        if cause:
            job.ticket.seal(cause)
        # Layers that a store didn't have to move would stay pending for its writers.
        job.ticket.counter.fail(cause or "nothing to move", finish)
        return _InFlight(job=job, staged=staged, finish=finish)

    def _check_owned(self, ticket: Ticket, plans: list[TransferPlan]) -> None:
        """A plan that came late may move nothing but the blocks that the ticket owns."""
        for transfer in merge_plans(plans, self._space.layout):
            strange = set(transfer.device_indices or ()) - ticket.blocks.get(
                transfer.pool, frozenset()
            )
            if strange:
                raise InvalidPlan(
                    asked=f"start a {self._direction.value} for {ticket.requests}",
                    found=f"ticket {ticket.id} doesn't own blocks {sorted(strange)[:8]} of pool "
                    f"{transfer.pool!r}",
                    remedy="name every block of the plan when the ticket is made",
                )

    def _copy(self, job: Job, staged: StagedPlan) -> str:
        for fence in job.fences:
            self.stream.wait(fence)
        self._staging.record_transfer_indices_on_stream(
            self.stream, staged.host_indices, staged.device_indices, staged.pool_transfers
        )
        store = self._direction is Direction.STORE
        digests = self._device.digests(staged, self.stream) if store else None
        try:
            for landing in self._device.copy(staged, self.stream):
                job.ticket.counter.recorded(landing.layer_id, landing.pools, landing.events)
                if job.ticket.cancelled:
                    return "cancelled"
        finally:
            if digests is not None:
                # They read the blocks beside the copies: the finish event covers them too.
                self.stream.wait(digests.event)
                job.ticket.sums = digests.sums
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
                ticket.seal(cause)
                ticket.counter.fail(cause, flight.finish)
                flight.finish.synchronize(None)
        except RuntimeError as fault:
            ticket.counter.revoke(str(fault))
            return str(fault)
        return ""
