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

    def recovered(self, cover: int | None, *, first_lease: int) -> int | None:
        """The owner was restarted; `cover` stands for every open lease of its earlier lives.

        Args:
            first_lease: ids from this one on are of the present life, and leases of their own.

        Returns:
            The cover, if there is nothing left that it stands for: to be released now.
        """
        with self._lock:
            earlier = {lease for lease in self._open if lease < first_lease}
            self._covered |= earlier
            self._open -= earlier
            if not self._covered:
                return cover
            self._cover = cover
            return None

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
