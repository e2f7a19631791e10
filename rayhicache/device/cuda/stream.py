"""Streams and events of the `cuda` device: torch's, with names and with limits on waits."""

from __future__ import annotations

import time

import torch

from rayhicache.device.protocols import Event

FIRST_PAUSE_SECONDS = 20e-6
LONGEST_PAUSE_SECONDS = 500e-6


class CudaEvent:
    """See `rayhicache.device.protocols.Event`."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def query(self) -> bool:
        """See `Event.query`."""
        return bool(self.event.query())

    def synchronize(self, timeout: float | None) -> bool:
        """See `Event.synchronize`. Asks now and then, since CUDA's own wait has no limit."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_PAUSE_SECONDS
        while not self.event.query():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True


class CudaStream:
    """See `rayhicache.device.protocols.Stream`."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.stream = stream

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        _cuda(event).event.record(self.stream)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`; the host goes on."""
        self.stream.wait_event(_cuda(event).event)


def _cuda(event: Event) -> CudaEvent:
    assert isinstance(event, CudaEvent), "events of two devices were mixed"
    return event
