"""Streams and events of the `cuda` device: torch's, with names and with limits on waits."""

from __future__ import annotations

import torch

from rayhicache.device.cuda.words import WordEvent, wait_for
from rayhicache.device.protocols import Event


class CudaEvent:
    """See `rayhicache.device.protocols.Event`."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def query(self) -> bool:
        """See `Event.query`."""
        return bool(self.event.query())

    def synchronize(self, timeout: float | None) -> bool:
        """See `Event.synchronize`. Asks now and then, since CUDA's own wait has no limit."""
        return wait_for(self.query, timeout)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let work enqueued on the stream from now on wait for it."""
        stream.wait_event(self.event)


class CudaStream:
    """See `rayhicache.device.protocols.Stream`."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.stream = stream

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        assert isinstance(event, CudaEvent), "events of two devices were mixed"
        event.event.record(self.stream)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`; the host goes on."""
        assert isinstance(event, CudaEvent | WordEvent), "events of two devices were mixed"
        event.hold(self.stream)
