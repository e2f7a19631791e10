"""Every fault that the tier can name.

An error says what was asked, what was found and what to do. Expected outcomes (a miss, no
room) are values and never appear here; bugs are assertions.
"""

from __future__ import annotations

from collections.abc import Sequence


class RayHiCacheError(Exception):
    """Base of all faults. Keyword-only, so a message can't lose one of its three sentences.

    Args:
        asked: the operation and its subject.
        found: what stood in the way.
        remedy: what the reader can do about it.
        details: further values, kept in `details`, for programs.
    """

    def __init__(self, *, asked: str, found: str, remedy: str, **details: object) -> None:
        super().__init__(f"{asked}: {found}. {remedy}")
        self.asked = asked
        self.found = found
        self.remedy = remedy
        self.details = details

    def __reduce__(self) -> tuple[object, ...]:
        """Keyword-only constructors don't survive pickling by themselves; Ray pickles errors."""
        fields = {"asked": self.asked, "found": self.found, "remedy": self.remedy}
        return _rebuild, (type(self), {**fields, **self.details})


def _rebuild(kind: type[RayHiCacheError], fields: dict[str, str]) -> RayHiCacheError:
    return kind(**fields)


class InvalidConfig(RayHiCacheError):
    """A configuration value is out of its range, or two contradict each other."""


class InvalidRequest(RayHiCacheError):
    """The caller's arguments can't be served; nothing was changed."""


class InvalidLayout(RayHiCacheError):
    """A pool or record layout contradicts itself."""


class InvalidPlan(RayHiCacheError):
    """A transfer plan is incomplete, uneven or out of range; nothing was enqueued."""


class LayoutMismatch(RayHiCacheError):
    """Attach with a layout that differs from the one that the arena was made for."""


class ArenaError(RayHiCacheError):
    """The arena's file can't be made, opened or trusted."""


class ArenaTooLarge(ArenaError):
    """The arena doesn't fit what tmpfs, the cgroup or Ray's memory monitor leave."""


class SeatTaken(ArenaError):
    """Another process holds the lock of this seat's arena."""


class UnknownLayer(RayHiCacheError):
    """A layer id that the pool doesn't have."""


class UnknownPool(RayHiCacheError):
    """A pool name that nobody registered."""


class UnknownModel(RayHiCacheError):
    """An engine spec names a model that this build can't make."""


class SessionEnded(RayHiCacheError):
    """The session is closed or its process is gone; its leases went with it."""


class StaleSlot(RayHiCacheError):
    """A slot reference of an earlier generation, or not of this session."""


class UnknownLease(RayHiCacheError):
    """The lease was released before, has passed its deadline, or never was."""


class TierClosed(RayHiCacheError):
    """The tier takes no more calls."""


class StaleEpoch(RayHiCacheError):
    """A message of an earlier life of the pool."""


class PoolUnreachable(RayHiCacheError):
    """The owner of the arena doesn't answer within its limit."""


class NoLocalPool(RayHiCacheError):
    """This node has no L2Pool of the tier."""


class DoubleFree(RayHiCacheError):
    """A device page was freed that was free already."""


class PageBusy(RayHiCacheError):
    """A page can't be written, freed or loaded now: an open ticket owns it."""


class DeviceNotFound(RayHiCacheError):
    """There is no such device, or its driver can't be used."""


class DeviceFull(RayHiCacheError):
    """The device has too little memory for a model and its pools."""


class UnboundRead(RayHiCacheError):
    """A pool was read or written outside `with pools.reading(...)`."""


class CaptureRefused(RayHiCacheError):
    """A graph capture was begun while tickets were open."""


class GateTimeout(RayHiCacheError):
    """A layer did not land, or a copy did not finish, within the limit."""


class LoadFailed(RayHiCacheError):
    """A load can't deliver its bytes: recompute the batch.

    Raised only after the copier has sealed the tickets and the caller's current stream waits
    for their last enqueued copy, so the same device pages can be computed into at once.
    """

    @property
    def requests(self) -> Sequence[str]:
        """Ids of the requests whose pages are not there."""
        found = self.details.get("requests", ())
        assert isinstance(found, (tuple, list))
        return tuple(found)

    @property
    def tickets(self) -> Sequence[int]:
        """Ids of the tickets that failed."""
        found = self.details.get("tickets", ())
        assert isinstance(found, (tuple, list))
        return tuple(found)


class PeerMismatch(RayHiCacheError):
    """Ranks of one group mean different things by the same transfer, or hold different pools."""


class PeerLost(RayHiCacheError):
    """A rank of the group ended, or gave up a transfer that all move together."""


class PeerUnreachable(RayHiCacheError):
    """This rank can't write to a peer's memory: the group's ranks load by themselves."""


class DigestMismatch(RayHiCacheError):
    """Bytes that crossed a network or a crash are not those that were stored."""


class TransportError(RayHiCacheError):
    """A peer did not answer in time, or answered something that can't be used."""


class MessageError(RayHiCacheError):
    """A message of an unknown type or version, or over its size limit."""


class PromptTooLong(RayHiCacheError):
    """A prompt and its answer don't fit the model's context or the device's pages."""


class QueueFull(RayHiCacheError):
    """A bounded queue has no room; try again later."""


class ClusterClosed(RayHiCacheError):
    """The cluster was shut down."""


class ClusterExists(RayHiCacheError):
    """A cluster of this name is running already."""


class ClusterNotFound(RayHiCacheError):
    """No cluster of this name at this Ray address."""


class RayNotFound(RayHiCacheError):
    """No Ray answers at the address."""


class LaunchFailed(RayHiCacheError):
    """A part of the cluster didn't come up; what had come up was taken down again."""


class JobFailed(RayHiCacheError):
    """A job, or a part of it, can't be finished."""


class JobCancelled(RayHiCacheError):
    """The job was cancelled by its owner."""


class JobTimeout(RayHiCacheError):
    """The job's result wasn't there within the caller's limit; the job goes on."""
