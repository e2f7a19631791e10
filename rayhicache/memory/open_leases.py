"""Leases of a process across restarts of the owner."""

from __future__ import annotations

import threading


class OpenLeases:
    """The leases that one process holds, as a port needs them. Any thread may call.

    A restarted owner grants one lease in place of all that were open. It is released with the
    last of them, so the process goes on releasing the ids it knows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._covered: set[int] = set()
        self._cover: int | None = None

    def granted(self, lease: int) -> None:
        """A lookup brought this lease."""
        with self._lock:
            self._open.add(lease)

    def recovered(self, cover: int | None) -> None:
        """The owner was restarted; `cover` stands for every lease that is open now."""
        with self._lock:
            self._covered |= self._open
            self._open.clear()
            self._cover = cover

    def released(self, lease: int) -> int | None:
        """The process releases a lease: which one to release at the owner, None for none yet."""
        with self._lock:
            if lease not in self._covered:
                self._open.discard(lease)
                return lease
            self._covered.discard(lease)
            if self._covered:
                return None
            cover, self._cover = self._cover, None
            return cover
