"""The layer transfer counter: the gate of one ticket.

Each (layer, pool) goes PENDING → RECORDED → DONE, or FAILED. While PENDING nobody has recorded its
event, and a wait on an unrecorded event would pass at once: so the reader's host thread blocks.
Once RECORDED the reader's stream waits on the event and its host thread goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from rayhicache.device.protocols import Device, Event
from rayhicache.errors import GateTimeout, LoadFailed


class LayerTransferCounter:
    """Which layers of which pools have landed. Any thread may call.

    Args:
        device: whose current stream waits.
        expected: per pool, the global ids of the layers that the ticket moves; ids may be sparse
            and differ from pool to pool.
        requests, ticket: for messages.
        wait_seconds: how long a reader may block for a layer that isn't recorded.
    """

    def __init__(
        self,
        device: Device,
        expected: Mapping[str, Sequence[int]],
        *,
        requests: Sequence[str],
        ticket: int,
        wait_seconds: float,
    ) -> None:
        self._device = device
        self._pending = {(layer_id, pool) for pool, ids in expected.items() for layer_id in ids}
        pools: dict[int, tuple[str, ...]] = {}
        for pool, ids in expected.items():
            for layer_id in ids:
                pools[layer_id] = (*pools.get(layer_id, ()), pool)
        self._pools = dict(sorted(pools.items()))
        self._recorded: dict[tuple[int, str], tuple[Event, ...]] = {}
        self._requests = tuple(requests)
        self._ticket = ticket
        self._wait_seconds = wait_seconds
        self._failure: tuple[str, Event | None] | None = None
        self._changed = threading.Condition()
        self._stalls: dict[int, float] = {}

    def recorded(self, layer_id: int, pools: Sequence[str], events: tuple[Event, ...]) -> None:
        """The layer's copies are enqueued and these events recorded behind them."""
        with self._changed:
            for pool in pools:
                self._pending.remove((layer_id, pool))
                self._recorded[layer_id, pool] = events
            self._changed.notify_all()

    def fail(self, cause: str, last: Event | None) -> None:
        """What is PENDING never comes. The ticket is sealed: nothing more will be enqueued.

        Args:
            last: recorded behind the last copy that was enqueued.
        """
        with self._changed:
            self._failure = (cause, last)
            self._changed.notify_all()

    def revoke(self, cause: str) -> None:
        """The copy stream failed: what was RECORDED may not have landed, so nothing is there."""
        with self._changed:
            self._pending.update(self._recorded)
            self._recorded.clear()
            self._failure = (cause, None)
            self._changed.notify_all()

    def done(self) -> None:
        """The host has seen the last copy pass: what is RECORDED needs no wait any more.

        From now on the events may be reused by later tickets of the same copy stream.
        """
        with self._changed:
            self._recorded = dict.fromkeys(self._recorded, ())

    def wait_until(self, layer_id: int, pool: str | None = None) -> None:
        """Make the caller's current stream wait until a layer has landed.

        Blocks the calling thread while the layer isn't recorded. A layer or pool that the ticket
        doesn't move passes.

        Args:
            layer_id: the model's global id.
            pool: the reader's own pool; None for all pools of the layer.

        Raises:
            LoadFailed: it never will; the current stream waits for the last enqueued copy.
            GateTimeout: it wasn't recorded within the limit.
        """
        pools = self._pools.get(layer_id, ())
        for name in pools if pool is None else (pool,) if pool in pools else ():
            for event in self._await_record(layer_id, name):
                self._wait(event, layer_id, name)

    def wait_all(self) -> None:
        """`wait_until` for every layer: for readers that can't be gated one by one."""
        for layer_id in self._pools:
            self.wait_until(layer_id)

    def wait_passed(self) -> None:
        """Make the caller's current stream wait until no copy of the ticket runs, failed or not.

        For writers of blocks that a store reads. Blocks while layers aren't recorded.

        Raises:
            GateTimeout: as `wait_until`.
        """
        try:
            self.wait_all()
        except LoadFailed:
            return  # the stream waits for the last enqueued copy, which is all that was asked

    def landed(self, layer_id: int, pool: str) -> bool:
        """Whether the layer's bytes are there. Doesn't block; for tests and status."""
        with self._changed:
            events = self._recorded.get((layer_id, pool))
        return events is not None and all(event.query() for event in events)

    def stalls(self) -> Mapping[int, float]:
        """Seconds that readers blocked their host thread, per layer."""
        with self._changed:
            return dict(self._stalls)

    def _await_record(self, layer_id: int, pool: str) -> tuple[Event, ...]:
        key = (layer_id, pool)
        with self._changed:
            if key in self._pending and self._failure is None:
                start = time.monotonic()
                known = self._changed.wait_for(
                    lambda: key not in self._pending or self._failure is not None,
                    self._wait_seconds,
                )
                stalled = time.monotonic() - start
                self._stalls[layer_id] = self._stalls.get(layer_id, 0.0) + stalled
                if not known:
                    raise GateTimeout(
                        asked=f"read layer {layer_id} of pool {pool!r}",
                        found=f"ticket {self._ticket} didn't enqueue it in {self._wait_seconds} s",
                        remedy="recompute the batch and see what holds the copy thread",
                    )
            if key not in self._pending:
                return self._recorded[key]
            assert self._failure is not None
            cause, last = self._failure
        if last is not None:
            self._wait(last, layer_id, pool)
        raise self._failed(layer_id, pool, cause)

    def _wait(self, event: Event, layer_id: int, pool: str) -> None:
        try:
            self._device.current_stream().wait(event)
        except RuntimeError as fault:  # the copy stream failed, and nothing of it can land
            raise self._failed(layer_id, pool, str(fault)) from fault

    def _failed(self, layer_id: int, pool: str, cause: str) -> LoadFailed:
        return LoadFailed(
            asked=f"read layer {layer_id} of pool {pool!r}",
            found=f"ticket {self._ticket} of requests {self._requests} failed: {cause}",
            remedy="recompute the batch into the same pages",
            requests=self._requests,
            tickets=(self._ticket,),
        )
