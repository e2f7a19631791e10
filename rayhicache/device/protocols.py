"""What the tier needs of a device: streams, events, index uploads and whole copies.

Event rules are CUDA's. `stream.record(event)` marks the work enqueued before it. A wait captures
the last record made before the call; waiting on an event that nobody has recorded passes at
once, which is why readers go through the layer transfer counter and never wait on events alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from rayhicache.device.digests import PageSums
    from rayhicache.device.paged import PagedGather
    from rayhicache.device.staging import StagedPlan


class Direction(Enum):
    """LOAD moves host to device, STORE device to host."""

    LOAD = "load"
    STORE = "store"


class Event(Protocol):
    """A point in the work of a stream. Reusable; a record replaces the earlier one."""

    def query(self) -> bool:
        """Whether the last record's work is done; True if there was none. Doesn't block."""

    def synchronize(self, timeout: float | None) -> bool:
        """Block the calling thread until the last record's work is done; False on time-out.

        Raises:
            RuntimeError: the stream's work failed.
        """


class Stream(Protocol):
    """Work that runs in order, beside other streams."""

    name: str

    def record(self, event: Event) -> None:
        """Mark the work enqueued so far. Doesn't block."""

    def wait(self, event: Event) -> None:
        """Work enqueued from now on runs after the event's last record.

        On a device whose current stream is the calling thread, that thread blocks.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """One layer of some pools whose copies are enqueued and whose events are recorded.

    The layer is there for a stream once it waits for every one of `events`.
    """

    layer_id: int
    pools: tuple[str, ...]
    events: tuple[Event, ...]


class Device(Protocol):
    """One accelerator, or the host standing in for one. Any thread may call."""

    torch_device: torch.device

    def current_stream(self) -> Stream:
        """The stream of the calling thread's compute."""

    def new_stream(self, name: str) -> Stream:
        """A stream of its own, which runs beside the compute."""

    def new_event(self) -> Event:
        """An event, not yet recorded."""

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is capturing a graph. Doesn't block."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory from the device's caching allocator.

        When the tensor dies its memory is given to the next caller, at once if no stream was
        recorded on it: the host doesn't wait for work that still uses it.
        """

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that asynchronous copies can read while the host goes on."""

    def upload(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Enqueue a copy of a pinned tensor to where copies read indices; return the target.

        The caller keeps `source` unchanged until the stream has passed this point.
        """

    def record_on_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory, once it dies, until work that is now enqueued is done."""

    def map_host(self, data: torch.Tensor, record_bytes: int) -> None:
        """Make an arena's memory reachable for copies, `uint8[n], host`; may go on beside.

        Copies work at once, and at full speed once it is reachable.

        Raises:
            InvalidRequest: some of it is mapped already.
        """

    def unmap_host(self, data: torch.Tensor) -> None:
        """Undo `map_host`. The caller guarantees that no copy uses the memory. Idempotent."""

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        """Enqueue a whole load or store, layer-major, yielding each layer as it is recorded.

        Events are taken from `staged.events` and stay unused until the plan is retired. The
        caller may stop iterating; what was enqueued by then still runs.
        """

    def digests(self, staged: StagedPlan, stream: Stream) -> PageSums:
        """Enqueue the sums of a plan's pages, read from the device's blocks.

        They run after what the stream has now, and may run beside what it gets later: the caller
        makes the stream wait for `PageSums.event` before it says that the plan is done. Doesn't
        block. The event is taken from `staged.events`.

        Raises:
            InvalidPlan: the plan doesn't move whole pages, in order.
        """

    def gather(self, gather: PagedGather) -> tuple[torch.Tensor, ...]:
        """Gather entries of paged memory: `uint8[total, entry_bytes], device` per section.

        Runs on the calling thread's current stream, and the caller doesn't wait for it. The
        caller guarantees that the lengths agree with their sum and their maximum, and that
        the indices within them are blocks: a device may see the opposite too late to raise.
        """

    def close(self) -> None:
        """Stop the device's streams. Idempotent."""
