"""One way to call an actor: with a limit, and with typed faults instead of Ray's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rayhicache.errors import RayHiCacheError

log = logging.getLogger(__name__)

LATE_SECONDS = 600.0
LATE_POLL_SECONDS = 1.0


class ActorGone(RayHiCacheError):
    """An actor is dead, restarting, cut off, or doesn't answer within its limit."""


class ActorSlow(ActorGone):
    """An actor didn't answer within its limit; it may yet do what it was asked."""


class ActorFault(RayHiCacheError):
    """An actor failed with a fault that has no type of ours: a bug, told in its log."""


def start(actor: Any, method: str, *args: object, what: str, group: str = "") -> Any:
    """Send a call; its object reference.

    Raises:
        ActorGone: this process has left Ray. Ray itself would start a new one at such a call.
    """
    if not ray.is_initialized():
        raise ActorGone(
            asked=what,
            found="this process has left Ray",
            remedy="connect to the cluster again, or launch it anew",
        )
    call = getattr(actor, method)
    if group:
        call = call.options(concurrency_group=group)
    return call.remote(*args)


def ask(
    actor: Any, method: str, *args: object, what: str, timeout: float | None, group: str = ""
) -> Any:
    """Call an actor and wait for its answer; as `start`, then `answer`."""
    return answer(start(actor, method, *args, what=what, group=group), what, timeout)


def answer(ref: Any, what: str, timeout: float | None) -> Any:
    """Wait for an actor's answer.

    Raises:
        RayHiCacheError: the callee's own typed fault, as it raised it.
        ActorGone: no answer.
        ActorFault: what the callee raised isn't ours.
    """
    try:
        return ray.get(ref, timeout=timeout)
    except GetTimeoutError as fault:
        raise ActorSlow(
            asked=what,
            found=f"no answer within {timeout} s",
            remedy="try again; `rayhicache status` tells how it is",
        ) from fault
    except RayTaskError as fault:
        # Ray wraps what a callee raised; a typed fault goes on as itself.
        if isinstance(fault.cause, RayHiCacheError):
            raise fault.cause from None
        raise ActorFault(
            asked=what,
            found=f"it failed with {type(fault.cause).__name__}: {fault.cause}",
            remedy="see its log, and report it: this is a bug",
        ) from fault
    except RayError as fault:
        raise ActorGone(
            asked=what,
            found=(str(fault).splitlines() or [type(fault).__name__])[0],
            remedy="try again: Ray restarts the actor; `rayhicache status` tells how it is",
        ) from fault


class LateAnswers:
    """Undoes what a call that was given up has done after all: nobody else knows of it.

    One daemon thread while there is something to wait for. Any thread may add.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, tuple[Callable[[Any], None], float]] = {}
        self._running = False

    def add(self, ref: Any, undo: Callable[[Any], None]) -> None:
        """Call `undo` with the answer, should one come. Faults of both are passed over."""
        with self._lock:
            self._open[ref] = (undo, time.monotonic() + LATE_SECONDS)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="late-answers", daemon=True).start()

    def num_open(self) -> int:
        """How many calls have not been answered yet."""
        with self._lock:
            return len(self._open)

    def _run(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                self._open = {ref: entry for ref, entry in self._open.items() if entry[1] > now}
                refs = list(self._open)
                if not refs or not ray.is_initialized():
                    self._running = False
                    return
            for ref in ray.wait(refs, num_returns=1, timeout=LATE_POLL_SECONDS)[0]:
                undo, _ = self._open[ref]
                try:
                    undo(answer(ref, "take a late answer", LATE_POLL_SECONDS))
                except RayHiCacheError as fault:
                    log.info("a late answer is passed over: %s", fault)
                with self._lock:
                    self._open.pop(ref, None)
