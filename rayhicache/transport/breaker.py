"""Leaving a peer alone for a while after it has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0


class Breaker:
    """Per peer: after a fault no calls for a while, twice as long after each further fault.

    Any thread may call; nothing blocks.

    Args:
        clock: seconds.
        longest_seconds: of a pause.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        longest_seconds: float = LONGEST_SECONDS,
    ) -> None:
        self._clock = clock
        self._longest_seconds = longest_seconds
        self._lock = threading.Lock()
        self._broken: dict[str, tuple[float, float]] = {}

    def allows(self, peer: str) -> bool:
        """Whether a call may be tried."""
        with self._lock:
            broken = self._broken.get(peer)
            return broken is None or self._clock() >= broken[1]

    def failed(self, peer: str) -> None:
        """A call failed."""
        with self._lock:
            last, _ = self._broken.get(peer, (0.0, 0.0))
            pause = min(max(2 * last, FIRST_SECONDS), self._longest_seconds)
            self._broken[peer] = (pause, self._clock() + pause)

    def worked(self, peer: str) -> None:
        """A call was answered: what was before is forgotten."""
        with self._lock:
            self._broken.pop(peer, None)
