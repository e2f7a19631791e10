"""Words in pinned host memory that copies count up, and that streams wait for by value.

An event belongs to the context and the stream that recorded it, and one is needed per layer. A
word needs neither: every stream of every context can wait for it, the host reads it without a
call of the driver, and one word counts all layers of all plans of a copy stream. A wait for a
value blocks until it is there, also where nobody has enqueued its write yet.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import torch

from rayhicache.device.cuda.driver import Driver

FIRST_PAUSE_SECONDS = 20e-6
LONGEST_PAUSE_SECONDS = 500e-6
_STRIDE = 16  # words between two that different streams write: one cache line each
_MASK = 0xFFFFFFFF


def wait_for(passed: Callable[[], bool], timeout: float | None) -> bool:
    """Ask now and then until it has passed; False on time-out. CUDA's own waits have no limit."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE_SECONDS
    while not passed():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return True


class Word:
    """One counter that a copy stream counts up. `take` on the stream's own thread only.

    Attributes:
        address: where streams and kernels write it, and wait for it.
        last: the last value that was reserved.
    """

    def __init__(self, memory: torch.Tensor, address: int) -> None:
        self.address = address
        self._memory = memory  # kept alive
        self._cell = ctypes.c_uint32.from_address(address)
        self.last = 0

    def take(self, count: int) -> int:
        """Reserve the next `count` values; the one before the first of them."""
        base = self.last
        self.last += count
        return base

    def reached(self, value: int) -> bool:
        """Whether it has counted so far; values may be 2**31 apart before they wrap."""
        return (self._cell.value - value) & _MASK < 1 << 31


class WordEvent:
    """See `rayhicache.device.protocols.Event`: passed once the word has reached the value."""

    __slots__ = ("_driver", "_value", "_word")

    def __init__(self, driver: Driver, word: Word, value: int) -> None:
        self._driver = driver
        self._word = word
        self._value = value

    def query(self) -> bool:
        """See `Event.query`. Reads host memory."""
        return self._word.reached(self._value)

    def synchronize(self, timeout: float | None) -> bool:
        """See `Event.synchronize`. A copy that failed never passes: wait for a recorded event."""
        return wait_for(self.query, timeout)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let work enqueued on the stream from now on wait for it."""
        self._driver.wait_value(self._word.address, self._value & _MASK, stream)


class WordBoard:
    """Pinned memory for words. Any thread may call."""

    def __init__(self, words: int = 256) -> None:
        self._memory = torch.zeros(words * _STRIDE, dtype=torch.int32, pin_memory=True)
        self._used = 0
        self._lock = threading.Lock()

    def new_word(self) -> Word:
        """A word that counts from 0."""
        with self._lock:
            if self._used * _STRIDE == self._memory.numel():
                self._memory = torch.zeros_like(self._memory, pin_memory=True)
                self._used = 0
            address = self._memory.data_ptr() + 4 * _STRIDE * self._used
            self._used += 1
            return Word(self._memory, address)
