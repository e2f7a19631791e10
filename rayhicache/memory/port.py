"""What a client asks of the owner of its node's arena, in one process or across Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.outcomes import Reserved
from rayhicache.core.slots import Region, SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What a process must know to map the arena.

    Attributes:
        session: id of the process's session.
        epoch: the life of the owner that granted it.
        path, inode, uuid: the arena's file; `inode` and `uuid` are checked after mapping.
        regions: where each group's records lie in the file.
    """

    session: int
    epoch: int
    path: str
    inode: int
    uuid: bytes
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlots:
    """The slots of a process's open tickets: leases it reads under, and slots it fills."""

    reading: tuple[SlotRef, ...]
    writing: tuple[SlotRef, ...]


class Port(Protocol):
    """The way to the owner. Any thread may call; each call has a time limit of its own.

    A call that can't reach the owner raises `PoolUnreachable`; the client makes a miss of it.
    """

    def attach(self, layout: RecordLayout, open_slots: Callable[[], OpenSlots]) -> Attachment:
        """Open this process's session; the first one fixes the tier's layout.

        Args:
            open_slots: called from a thread of the port when the owner has been restarted, to
                name what this process still reads and writes.

        Raises:
            LayoutMismatch: the arena was made for another layout.
            NoLocalPool: this node has no owner.
        """

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        """Find and lease in one call; records of other nodes may be pulled before it returns."""

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        """Slots for the missing keys of one chunk, all or nothing; None means no room."""

    def commit(self, refs: Sequence[SlotRef], digests: Sequence[tuple[int, ...]]) -> int:
        """The bytes of these records are there; how many turned READY."""

    def abort(self, refs: Sequence[SlotRef], *, sealed: bool) -> None:
        """Give up filling; `sealed` if copies may still land, until `unseal`."""

    def unseal(self, refs: Sequence[SlotRef]) -> None:
        """No copy into these slots can land any more."""

    def release(self, lease: int) -> None:
        """End a lease, exactly once. A lease of an earlier life of the owner ends silently."""

    def doubt(self, keys: Sequence[PageKey]) -> None:
        """These records failed to load: nobody shall find them again."""

    def close(self) -> None:
        """End the session and all that it holds. Idempotent."""
