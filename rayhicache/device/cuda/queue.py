"""Queues of driver copies that let a forward's launches through.

The driver locks its context during a call. One that enqueues hundreds of fragments takes hundreds
of microseconds, and one that finds the hardware's queue full waits for room, with every launch of
the forward behind it. So calls are short, and a queue never holds more than the hardware's takes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from rayhicache.device.cuda.words import Word, WordEvent

if TYPE_CHECKING:
    import torch

    from rayhicache.device.cuda.driver import Driver
    from rayhicache.device.cuda.stream import CudaEvent

CALL_FRAGMENTS = 512
FLIGHT_FRAGMENTS = 1024
PAUSE_SECONDS = 50e-6
PAUSE_SECONDS_MAX = 2e-3
PAUSED_SHARE = 0.8
CHECK_SECONDS = 0.25


class CopyQueue:
    """Driver copies that run in order. One thread at a time.

    Enqueueing waits while the queue is full: until the copies that lie before have passed.

    Args:
        word: that it counts up.
    """

    def __init__(self, driver: Driver, stream: torch.cuda.Stream, word: Word) -> None:
        self.stream = stream
        self._driver = driver
        self._word = word
        self._flight: deque[tuple[int, int]] = deque()  # value once passed, fragments
        self._fragments = 0
        self._pause = PAUSE_SECONDS

    def wait(self, event: CudaEvent) -> None:
        """Let copies enqueued from now on wait for an event that has been recorded."""
        event.hold(self.stream)

    def copy(self, targets: int, sources: int, sizes: int, count: int, *, settled: bool) -> None:
        """Enqueue fragments; see `Driver.copy_batch`.

        Raises:
            RuntimeError: the driver refused, or an earlier copy failed.
        """
        for at in range(0, count, CALL_FRAGMENTS):
            some = min(CALL_FRAGMENTS, count - at)
            self._make_room(some)
            self._driver.copy_batch(
                targets + 8 * at,
                sources + 8 * at,
                sizes + 8 * at,
                some,
                self.stream.cuda_stream,
                settled=settled,
            )
            self._count(some)

    def copy_strided(self, table: int, count: int, row_bytes: int) -> None:
        """Enqueue strided copies; see `Driver.copy_strided`.

        Args:
            row_bytes: of the table.
        """
        for at in range(0, count, CALL_FRAGMENTS):
            some = min(CALL_FRAGMENTS, count - at)
            self._make_room(some)
            self._driver.copy_strided(table + row_bytes * at, some, self.stream.cuda_stream)
            self._count(some)

    def passed(self) -> WordEvent:
        """An event that passes once everything enqueued so far is there."""
        return WordEvent(self._driver, self._word, self._word.last)

    def _count(self, fragments: int) -> None:
        value = self._word.take(1) + 1
        self._driver.write_value(self._word.address, value & 0xFFFFFFFF, self.stream.cuda_stream)
        self._flight.append((value, fragments))
        self._fragments += fragments

    def _make_room(self, fragments: int) -> None:
        """Wait until so many more fit; asks as seldom as it can, since asking takes the GIL."""
        begun = time.monotonic()
        check = begun + CHECK_SECONDS
        pause = self._pause
        while self._flight:
            value, some = self._flight[0]
            if self._word.reached(value):
                self._flight.popleft()
                self._fragments -= some
            elif self._fragments + fragments <= FLIGHT_FRAGMENTS:
                break
            else:
                time.sleep(pause)
                pause = PAUSE_SECONDS
                if time.monotonic() > check:
                    check += CHECK_SECONDS
                    self.stream.query()  # raises what made the stream's work fail
        # Next time it will take about as long: the copies before are about as many.
        waited = PAUSED_SHARE * (time.monotonic() - begun)
        self._pause = min(max(waited, PAUSE_SECONDS), PAUSE_SECONDS_MAX)
