"""Registering host memory with the driver: in small pieces, in the background, all or nothing.

One call for many gigabytes stops every launch and synchronisation of the process for as long; in
pieces of 16 MiB, mapped before the driver takes its lock, and with pauses, one in hundreds waits a
millisecond or a few.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable

from rayhicache.errors import InvalidRequest

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
PAUSE_SECONDS = 0.002
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

Register = Callable[[int, int], int]
Unregister = Callable[[int], int]


def populate(address: int, nbytes: int) -> None:
    """Map resident pages before the driver does so under its lock, page by page.

    Where the system can't, the driver does, and launches wait a little longer.
    """
    start = address - address % mmap.PAGESIZE
    stop = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _POPULATE_WRITE
    )


class HostRegistration:
    """One range of host memory that a background thread registers, from its start to its end.

    If the driver refuses a piece, the earlier ones are unregistered again, one warning is
    logged, and copies stay pageable.

    Args:
        address, nbytes: of the range; resident, so that registering doesn't fault pages in.
        granule_bytes: pieces are multiples of it, so no record lies across an edge.
        register, unregister: the driver's calls; 0 for success.
    """

    _known: dict[int, int] = {}  # noqa: RUF012  # ranges registered in this process, by address
    _lock = threading.Lock()

    def __init__(
        self,
        address: int,
        nbytes: int,
        granule_bytes: int,
        *,
        register: Register,
        unregister: Unregister,
        piece_bytes: int = PIECE_BYTES,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        with self._lock:
            for start, size in self._known.items():
                if address < start + size and start < address + nbytes:
                    raise InvalidRequest(
                        asked=f"register {nbytes:,} B of host memory at {address:#x}",
                        found=f"{size:,} B at {start:#x} are registered already",
                        remedy="attach once per process, and close the first attachment before",
                    )
            self._known[address] = nbytes
        self._address = address
        self._nbytes = nbytes
        self._register = register
        self._unregister = unregister
        self._piece = max(piece_bytes // granule_bytes, 1) * granule_bytes
        self._pieces: list[int] = []
        self._ready_bytes = 0
        self._stopped = threading.Event()
        self._pause = pause or self._stopped.wait
        self._thread = threading.Thread(target=self._run, name="host-registration", daemon=True)
        self._thread.start()

    @property
    def ready_bytes(self) -> int:
        """How much of the range, from its start, is registered: 0 after a failure."""
        return self._ready_bytes

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the thread has ended; whether the whole range is registered."""
        self._thread.join(timeout)
        return self._ready_bytes == self._nbytes

    def close(self) -> None:
        """Unregister everything. The caller guarantees that no copy uses it. Idempotent."""
        self._stopped.set()
        self._thread.join()
        self._undo()
        with self._lock:
            self._known.pop(self._address, None)

    def _run(self) -> None:
        for offset in range(0, self._nbytes, self._piece):
            if self._stopped.is_set():
                return
            size = min(self._piece, self._nbytes - offset)
            result = self._register(self._address + offset, size)
            if result:
                self._undo()
                log.warning(
                    "the driver refused to register host memory (error %d at %d of %d B): "
                    "copies go through pageable memory and are slower; raise the memlock limit",
                    result,
                    offset,
                    self._nbytes,
                )
                return
            self._pieces.append(self._address + offset)
            self._ready_bytes = offset + size
            self._pause(PAUSE_SECONDS)

    def _undo(self) -> None:
        self._ready_bytes = 0
        while self._pieces:
            self._unregister(self._pieces.pop())
