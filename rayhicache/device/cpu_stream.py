"""Streams of the `cpu` device: threads with CUDA's event rules, that tests can hold."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rayhicache.device.protocols import Event
from rayhicache.errors import GateTimeout

RECORD = "record"


class _Mark:
    """One record of an event: done once the stream has come to it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.fault: BaseException | None = None


class CpuEvent:
    """An event of the `cpu` device."""

    def __init__(self) -> None:
        self._mark: _Mark | None = None

    def query(self) -> bool:
        """See `Event.query`."""
        return self._mark is None or self._mark.done.is_set()

    def synchronize(self, timeout: float | None) -> bool:
        """See `Event.synchronize`."""
        mark = self._mark
        if mark is None:
            return True
        if not mark.done.wait(timeout):
            return False
        if mark.fault is not None:
            raise RuntimeError(f"work before the event failed: {mark.fault}") from mark.fault
        return True

    def captured(self) -> _Mark | None:
        """The last record made so far; what a wait made now waits for."""
        return self._mark

    def recorded(self, mark: _Mark) -> None:
        """A new record replaces the last one."""
        self._mark = mark


class HostStream:
    """The calling thread as a stream: what it has called is done."""

    name = "host"

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def record(self, event: Event) -> None:
        """See `Stream.record`; the calling thread has no work pending."""
        mark = _Mark()
        mark.done.set()
        _cpu(event).recorded(mark)

    def wait(self, event: Event) -> None:
        """Block the calling thread.

        Raises:
            GateTimeout: the event's work isn't done within the limit.
            RuntimeError: it failed.
        """
        if not event.synchronize(self._timeout):
            raise GateTimeout(
                asked="wait for a copy",
                found=f"it wasn't done after {self._timeout} s",
                remedy="see which copy stream hangs",
            )


class CpuStream:
    """A thread that runs operations in order; `pause` and `step` hold and let go of it.

    A failed operation is sticky, as on a GPU: later operations don't run, and whoever waits for
    them is told.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._operations: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._permits: int | None = None
        self._done = 0
        self._closed = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, operation: Callable[[], None], label: str = "") -> None:
        """Run the operation after all that was enqueued before. Doesn't block."""
        with self._changed:
            assert not self._closed, f"stream {self.name} is closed"
            self._operations.append((label, operation))
            self._changed.notify_all()

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        mark = _Mark()
        _cpu(event).recorded(mark)

        def passed() -> None:
            mark.fault = self._fault
            mark.done.set()

        self.enqueue(passed, RECORD)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`; the stream's thread waits, the caller goes on."""
        mark = _cpu(event).captured()
        if mark is None:
            return

        def hold() -> None:
            mark.done.wait()
            if mark.fault is not None:
                raise RuntimeError(f"awaited work failed: {mark.fault}") from mark.fault

        self.enqueue(hold, "wait")

    def pause(self) -> None:
        """Start no further operation until `step` or `resume`."""
        with self._changed:
            self._permits = 0

    def step(self, count: int = 1) -> None:
        """Let `count` operations of a paused stream run, and return when they have.

        Blocks until that many have been enqueued and run.
        """
        with self._changed:
            assert self._permits is not None, "pause the stream before stepping it"
            self._permits += count
            goal = self._done + self._permits
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._done >= goal, 30.0):
                raise GateTimeout(
                    asked=f"step stream {self.name} by {count}",
                    found="not so many operations came within 30 s",
                    remedy="see `pending()`",
                )

    def resume(self) -> None:
        """Run freely again."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def pending(self) -> list[str]:
        """Labels of the operations that haven't started."""
        with self._changed:
            return [label for label, _ in self._operations]

    def wait_pending(self, count: int, timeout: float = 30.0) -> bool:
        """Block until at least `count` operations are waiting on a paused stream."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._operations) >= count, timeout)

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block until all that is enqueued now has run."""
        event = CpuEvent()
        self.record(event)
        return event.synchronize(timeout)

    @property
    def closed(self) -> bool:
        """Whether the stream was closed."""
        return self._closed

    def close(self) -> None:
        """Drop what has not started and stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._operations.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_run)
                if self._closed:
                    return
                label, operation = self._operations.popleft()
                if self._permits is not None:
                    self._permits -= 1
            self._run_one(label, operation)
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _run_one(self, label: str, operation: Callable[[], None]) -> None:
        if self._fault is not None and label != RECORD:
            return
        try:
            operation()
        except BaseException as fault:  # sticky, and told to whoever waits on this stream
            self._fault = fault

    def _may_run(self) -> bool:
        return self._closed or (bool(self._operations) and self._permits != 0)


def _cpu(event: Event) -> CpuEvent:
    assert isinstance(event, CpuEvent), "events of two devices were mixed"
    return event
