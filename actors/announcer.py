"""Tells the directory what this pool has: in batches, after the fact, again after a fault."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from rayhicache.core.directory import Announcement
from rayhicache.core.keys import PageKey
from rayhicache.core.outcomes import Effects
from rayhicache.errors import RayHiCacheError

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0


class Announcer:
    """One thread that announces. A directory that is new, or was away, is told everything.

    Args:
        send: one announcement to the directory; False asks for a whole one.
        whole: every key that the pool has.
    """

    def __init__(
        self,
        seat: str,
        epoch: int,
        send: Callable[[Announcement], bool],
        whole: Callable[[], Sequence[PageKey]],
    ) -> None:
        self._seat = seat
        self._epoch = epoch
        self._send = send
        self._whole = whole
        self._changed = threading.Condition()
        self._pending: dict[PageKey, bool] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def tell(self, effects: Effects) -> None:
        """Records came or went; the last news of a key counts. Doesn't block."""
        with self._changed:
            for _, key in effects.removed:
                self._pending[key] = False
            for _, key in effects.stored:
                self._pending[key] = True
            if self._pending:
                self._changed.notify_all()

    def stop(self) -> None:
        """Announce no more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(5.0)

    def _run(self) -> None:
        everything = True
        while True:
            with self._changed:
                if self._stopped:
                    return
                pending, self._pending = self._pending, {}
            everything = not self._announce(pending, everything)
            with self._changed:
                if everything:
                    self._changed.wait_for(lambda: self._stopped, HEARTBEAT_SECONDS / 4)
                else:
                    # With nothing to tell, a heartbeat finds out whether the directory is new.
                    self._changed.wait_for(
                        lambda: self._stopped or bool(self._pending), HEARTBEAT_SECONDS
                    )

    def _announce(self, pending: dict[PageKey, bool], everything: bool) -> bool:
        """Send; whether the directory knows all of it now."""
        stored = tuple(key for key, there in pending.items() if there)
        message = Announcement(
            seat=self._seat,
            epoch=self._epoch,
            whole=everything,
            # A whole announcement is made after the pending ones were taken, so it has them.
            stored=tuple(self._whole()) if everything else stored,
            removed=() if everything else tuple(k for k, there in pending.items() if not there),
        )
        try:
            return self._send(message)
        except RayHiCacheError as fault:
            log.info("the directory will be told again: %s", fault)
            return False
