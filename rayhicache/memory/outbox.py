"""What the tier decided, told to others: in order, and never under the owner's mutex."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from rayhicache.core.outcomes import Effects

_Resolved = tuple[Future[bool], bool]


class Outbox:
    """Effects on their way to subscribers, and the futures of parked waiters.

    `park`, `forget`, `end_session` and `post` are called under the owner's mutex; `deliver`
    without it, by every thread that may have posted.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Effects], None]] = []
        self._parked: dict[int, tuple[int, Future[bool]]] = {}
        self._pending: deque[tuple[Effects | None, list[_Resolved]]] = deque()
        self._delivering = threading.Lock()

    def subscribe(self, callback: Callable[[Effects], None]) -> None:
        """Call back with all effects from now on, in order, on any thread.

        The callback must not raise; it may call the owner.
        """
        self._subscribers = [*self._subscribers, callback]

    def park(self, waiter: int, session: int) -> Future[bool]:
        """A future that tells whether what the waiter waits for is READY."""
        future: Future[bool] = Future()
        # Only the outbox settles it.
        future.set_running_or_notify_cancel()
        self._parked[waiter] = (session, future)
        return future

    def forget(self, waiter: int) -> None:
        """The waiter's time is up."""
        self._parked.pop(waiter, None)

    def num_parked(self) -> int:
        """How many wait."""
        return len(self._parked)

    def end_session(self, session: int) -> None:
        """The waiters of a session that has ended get a miss."""
        ended = [waiter for waiter, (owner, _) in self._parked.items() if owner == session]
        self._pending.append((None, [(self._parked.pop(waiter)[1], False) for waiter in ended]))

    def end_all(self) -> None:
        """All waiters get a miss: the owner closes."""
        futures = [(future, False) for _, future in self._parked.values()]
        self._parked.clear()
        self._pending.append((None, futures))

    def post(self, effects: Effects) -> None:
        """Queue what a decision brought about."""
        woken = [
            (self._parked.pop(wake.waiter)[1], wake.ready)
            for wake in effects.wakes
            if wake.waiter in self._parked
        ]
        if woken or effects.stored or effects.removed:
            self._pending.append((effects, woken))

    def deliver(self) -> None:
        """Tell what is queued, in order.

        One thread tells at a time and takes over what others queue meanwhile, so a subscriber
        that calls the owner doesn't see effects out of order.
        """
        while self._pending:
            if not self._delivering.acquire(blocking=False):
                # Whoever delivers looks at the queue again after it has let go.
                return
            try:
                while self._pending:
                    self._tell(*self._pending.popleft())
            finally:
                self._delivering.release()

    def _tell(self, effects: Effects | None, resolved: list[_Resolved]) -> None:
        if effects is not None and (effects.stored or effects.removed):
            for subscriber in self._subscribers:
                subscriber(effects)
        for future, ready in resolved:
            future.set_result(ready)
