"""The board: words in shared memory by which the ranks of a group follow each other."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path

import torch

from rayhicache.core.peers import NUMBER_BYTES, RECORDS, BoardShape

FIRST_PAUSE_SECONDS = 20e-6
LONGEST_PAUSE_SECONDS = 500e-6
_CYCLE = 1 << 31


def wait_until(passed: Callable[[], bool], timeout: float | None) -> bool:
    """Ask now and then until it has passed; False on time-out."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE_SECONDS
    while not passed():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return True


class Lock:
    """A lock between the threads and processes that opened its file; it ends with its holder.

    One object is used by one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self, timeout: float) -> bool:
        """Take it; False on time-out."""
        return wait_until(self._taken, timeout)

    def release(self) -> None:
        """Give it back."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file. Once."""
        os.close(self._fd)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Board:
    """One rank's mapping of the board. Any thread may call; each word has one writer.

    Args:
        path: of the file, which the first rank that comes makes, all zeros.
    """

    def __init__(self, path: Path, shape: BoardShape) -> None:
        self.shape = shape
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, shape.nbytes)
            self._map = mmap.mmap(fd, shape.nbytes)
        finally:
            os.close(fd)
        # Kept as one buffer: streams hold its address, so the mapping lives as long as this.
        self._buffer = (ctypes.c_char * shape.nbytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._buffer)

    def word(self, offset: int) -> int:
        """A word that streams write."""
        return ctypes.c_uint32.from_address(self.address + offset).value

    def set_word(self, offset: int, value: int) -> None:
        """Write one as the host: for a stream of the host, or in a dead rank's stead."""
        ctypes.c_uint32.from_address(self.address + offset).value = value

    def reached(self, offset: int, value: int) -> bool:
        """Whether a word is at least the value, as streams compare."""
        return (self.word(offset) - value) & 0xFFFFFFFF < _CYCLE

    def number(self, offset: int) -> int:
        """A word of a host."""
        return ctypes.c_uint64.from_address(self.address + offset).value

    def set_number(self, offset: int, value: int) -> None:
        """Write one; never torn."""
        ctypes.c_uint64.from_address(self.address + offset).value = value

    def publish(
        self, lane: int, rank: int, number: int, digest: int, indices: torch.Tensor, *, at: int
    ) -> None:
        """Write the rank's record of a transfer.

        Args:
            indices: `int32[count]`, at most `indices_max`: device blocks of all pools, in order.
            at: which of its records; not the one of the transfer before.
        """
        start = self.shape.record(lane, rank, at)
        raw = ctypes.string_at(indices.data_ptr(), 4 * indices.numel())
        self.set_number(start, 0)
        self._map[start + 4 * NUMBER_BYTES : start + 4 * NUMBER_BYTES + len(raw)] = raw
        for place, value in enumerate((digest, len(raw), _check(number, digest, raw)), 1):
            self.set_number(start + place * NUMBER_BYTES, value)
        self.set_number(start, number)

    def published(self, lane: int, rank: int, number: int) -> tuple[int, torch.Tensor] | None:
        """Digest and `int32[count]` of a rank's record of a transfer; None if it isn't whole.

        Checked whole: the machine's memory may show the number before what was written earlier.
        """
        for at in range(RECORDS):
            start = self.shape.record(lane, rank, at)
            if self.number(start) != number:
                continue
            digest, nbytes, check = (self.number(start + i * NUMBER_BYTES) for i in (1, 2, 3))
            raw = bytearray(self._map[start + 4 * NUMBER_BYTES : start + 4 * NUMBER_BYTES + nbytes])
            if len(raw) == nbytes and _check(number, digest, raw) == check:
                return digest, torch.tensor(array("i", raw), dtype=torch.int32)
        return None


def _check(number: int, digest: int, raw: bytes | bytearray) -> int:
    seed = zlib.crc32(digest.to_bytes(NUMBER_BYTES, "little"), number & 0xFFFFFFFF)
    return zlib.crc32(raw, seed)
