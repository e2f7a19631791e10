"""Processes: who they are, whether they live, and being told when they end."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PIPE_READ_BYTES = 4096
_START_TIME_FIELD = 22
_FIELDS_BEFORE_STATE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of this host, told apart from a later one with the same pid.

    Attributes:
        pid: of the process, in its pid namespace.
        start_time: in clock ticks since boot.
        pid_namespace: inode of the namespace.
        client: a name for people.
    """

    pid: int
    start_time: int
    pid_namespace: int
    client: str = ""


def start_time_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none of that pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold blanks and brackets: the fields are counted from its end.
    after_name = stat[stat.rindex(")") + 1 :].split()
    return int(after_name[_START_TIME_FIELD - _FIELDS_BEFORE_STATE - 1])


def own_pid_namespace() -> int:
    """Inode of this process's pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def this_process(client: str = "") -> ProcessIdentity:
    """The identity of the calling process."""
    start_time = start_time_of(os.getpid())
    assert start_time is not None
    return ProcessIdentity(
        pid=os.getpid(),
        start_time=start_time,
        pid_namespace=own_pid_namespace(),
        client=client,
    )


def open_process(identity: ProcessIdentity) -> int | None:
    """A pidfd of the process, which the caller closes; None if it has ended.

    The pidfd comes first and the start time is read after: if that still fits, the pidfd is of
    this process and not of a later one with its pid.
    """
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if start_time_of(identity.pid) == identity.start_time and not _has_ended(pidfd):
        return pidfd
    os.close(pidfd)
    return None


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether the process still runs; a zombie doesn't."""
    pidfd = open_process(identity)
    if pidfd is None:
        return False
    os.close(pidfd)
    return True


def _has_ended(pidfd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))


class ProcessWatcher:
    """Tells when processes end: the kernel makes their pidfds readable, milliseconds after.

    One daemon thread calls `ended(key)`, once per watched key, and `tick()` now and then; neither
    may raise. `watch` and `unwatch` may be called from any thread, from `ended` too.
    """

    def __init__(
        self,
        ended: Callable[[int], None],
        *,
        tick: Callable[[], None] = lambda: None,
        tick_seconds: float = 0.5,
    ) -> None:
        self._ended = ended
        self._tick = tick
        self._tick_seconds = tick_seconds
        self._lock = threading.Lock()
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_write: int | None = wake_write
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="process-watcher", daemon=True)
        self._thread.start()

    def watch(self, key: int, identity: ProcessIdentity) -> bool:
        """Call `ended(key)` when the process ends; False, and no call, if it already has."""
        pidfd = open_process(identity)
        if pidfd is None:
            return False
        with self._lock:
            if self._closed:
                os.close(pidfd)
                return True
            assert key not in self._pidfds
            self._pidfds[key] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, key)
        self._wake()
        return True

    def unwatch(self, key: int) -> None:
        """Watch a key no longer. Idempotent; a call of `ended` may be under way."""
        self._forget(key)

    def close(self) -> None:
        """Stop the thread and wait for it, unless it is the caller. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write is not None:
                # A full pipe wakes as well.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"\0")

    def _forget(self, key: int, *, if_ended: bool = False) -> bool:
        with self._lock:
            pidfd = self._pidfds.get(key)
            # An event that was fetched before its descriptor was closed and used again would
            # tell the end of the wrong process, so the descriptor is asked once more.
            if pidfd is None or (if_ended and not _has_ended(pidfd)):
                return False
            del self._pidfds[key]
            self._selector.unregister(pidfd)
            os.close(pidfd)
            return True

    def _run(self) -> None:
        while not self._closed:
            for event, _ in self._selector.select(timeout=self._tick_seconds):
                if event.data is None:
                    os.read(self._wake_read, _PIPE_READ_BYTES)
                elif self._forget(event.data, if_ended=True):
                    self._ended(event.data)
            self._tick()
        for key in list(self._pidfds):
            self._forget(key)
        with self._lock:
            self._selector.close()
            os.close(self._wake_read)
            assert self._wake_write is not None
            os.close(self._wake_write)
            self._wake_write = None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger: it keeps what it holds."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 1 :].split()[0] in ("T", "t")
