"""The arena: one file of host memory that holds a node's records and outlives its owner."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from rayhicache.core.layout import RecordLayout
from rayhicache.core.slots import (
    Region,
    Session,
    SlotEntry,
    SlotRef,
    SlotState,
    divide_regions,
)
from rayhicache.errors import ArenaError, InvalidLayout
from rayhicache.memory import folder as folders
from rayhicache.memory import format as fmt
from rayhicache.memory.key_index import KeyIndex, key_prefix
from rayhicache.memory.layout_codec import decode_layout, encode_layout
from rayhicache.memory.seat import take_seat, untrusted
from rayhicache.memory.sizes import HostMemory

_GROUPS_MAX = 256


class Arena:
    """The owner's side of an arena's file: it holds the seat's lock and is the only writer of
    the tables. Not thread-safe but for `view`; it is the tier's `SlotTable`, under its mutex.

    Attributes:
        path, inode, uuid: of the file.
        epoch: this life of the owner.
        capacity_bytes: size of the file.
        layout: None until it was fixed.
        regions: where each group's records lie; empty until then.
    """

    def __init__(self, path: Path, fd: int, identity: fmt.Identity) -> None:
        self.path = path
        self.inode = os.fstat(fd).st_ino
        self.uuid = identity.uuid
        self.capacity_bytes = identity.capacity_bytes
        self.layout: RecordLayout | None = None
        self.regions: tuple[Region, ...] = ()
        self._fd = fd
        self._map = mmap.mmap(fd, identity.capacity_bytes)
        self._bytes = memoryview(self._map)
        self._groups: list[int] = []
        self._index: KeyIndex | None = None
        self._indexed: dict[int, int] = {}
        self.epoch = fmt.read_epoch(self._bytes) + 1
        fmt.write_epoch(self._bytes, self.epoch)
        stored = fmt.read_division(self._bytes)
        if stored is not None:
            self._adopt_division(*stored)

    @classmethod
    def create_or_adopt(
        cls,
        root: Path,
        tier: str,
        seat: str,
        capacity_bytes: int,
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
        memory: HostMemory | None = None,
    ) -> Arena:
        """Take a seat: adopt its arena, or make one whose memory is all there.

        Blocks while memory is being filled, about a second for 2 GiB. A new life begins: the
        epoch is one more than the last.

        Args:
            root: folder of all arenas of this user, on tmpfs or hugetlbfs.
            capacity_bytes: of the whole file; rounded down to pages.
            progress: told (bytes there, bytes asked) while it is filled.
            memory: what the host has; read from it by default.

        Raises:
            SeatTaken: another process holds it.
            ArenaTooLarge: the host can't hold it; nothing was left behind.
            ArenaError: the file there can't be trusted, or has another size.
        """
        path = folders.arena_path(root, tier, seat)
        fd, identity = take_seat(path, capacity_bytes, progress, memory)
        try:
            return cls(path, fd, identity)
        except BaseException:
            os.close(fd)
            raise

    # ── layout ──────────────────────────────────────────────────────────────────────────────

    def format(self, layout: RecordLayout) -> None:
        """Fix the layout and divide the file; once in an arena's life.

        Raises:
            ArenaError: no room for one record of each group, or too many groups.
        """
        assert self.layout is None
        packed = encode_layout(layout)
        if len(packed) > fmt.LAYOUT_BYTES_MAX or len(layout.groups) > _GROUPS_MAX:
            raise ArenaError(
                asked="store the layout in the arena",
                found=f"it takes {len(packed):,} B and has {len(layout.groups)} groups",
                remedy=f"at most {fmt.LAYOUT_BYTES_MAX:,} B and {_GROUPS_MAX} groups fit",
            )
        regions = _divide(layout, self.capacity_bytes)
        num_slots = sum(region.num_slots for region in regions)
        division = fmt.Division(
            fingerprint=bytes.fromhex(layout.fingerprint()),
            layout_bytes=len(packed),
            num_slots=num_slots,
            num_cells=fmt.num_cells(num_slots),
            data_offset=fmt.data_offset(num_slots),
        )
        # Nobody can have written to a file whose division was never finished: it is all zeros.
        fmt.write_division(self._bytes, division, packed)
        self._adopt_division(division, packed)

    def _adopt_division(self, division: fmt.Division, packed: bytes) -> None:
        try:
            layout = decode_layout(packed)
        except InvalidLayout as fault:
            raise untrusted(self.path, fault.found) from fault
        regions = _divide(layout, self.capacity_bytes)
        num_slots = sum(region.num_slots for region in regions)
        mine = bytes.fromhex(layout.fingerprint())
        if division.fingerprint != mine or division.num_slots != num_slots:
            raise untrusted(self.path, "its layout is divided in another way")
        self.layout, self.regions = layout, regions
        self._groups = [
            number for number, region in enumerate(regions) for _ in range(region.num_slots)
        ]
        self._index = KeyIndex(_cells(self._bytes, division))
        # A kill in the middle of a removal leaves the index wrong; it follows from the table.
        self._index.clear()
        self._indexed.clear()

    # ── slot table ──────────────────────────────────────────────────────────────────────────

    def put(self, slot: int, entry: SlotEntry) -> None:
        """See `SlotTable.put`. The key index has the READY records that can be found, no others."""
        assert self._index is not None
        findable = entry.state is SlotState.READY and bool(entry.key)
        if not findable and slot in self._indexed:
            self._index.remove(self._indexed.pop(slot), slot)
        packed = fmt.pack_entry(slot, entry)
        at = fmt.TABLE_OFFSET + slot * fmt.ENTRY_BYTES
        # An adopted entry that didn't change is left alone: a kill can't tear what isn't written.
        if self._bytes[at : at + fmt.ENTRY_BYTES] != packed:
            body = at + fmt.WORD_BYTES
            self._bytes[body : at + fmt.ENTRY_BYTES] = packed[fmt.WORD_BYTES :]
            self._bytes[at:body] = packed[: fmt.WORD_BYTES]
        if findable and slot not in self._indexed:
            prefix = key_prefix(entry.key, entry.group)
            self._indexed[slot] = prefix
            self._index.insert(prefix, SlotRef(slot, entry.generation))

    def entries(self) -> Iterable[tuple[int, SlotEntry]]:
        """The table as an earlier life left it; what is torn or damaged reads as SEALED."""
        for slot, group in enumerate(self._groups):
            at = fmt.TABLE_OFFSET + slot * fmt.ENTRY_BYTES
            packed = bytes(self._bytes[at : at + fmt.ENTRY_BYTES])
            yield slot, fmt.unpack_entry(slot, packed, group)

    # ── attachments ─────────────────────────────────────────────────────────────────────────

    def sessions(self) -> list[Session]:
        """The sessions in the attachment table."""
        return fmt.read_sessions(self._bytes)

    def add_session(self, session: Session) -> None:
        """Write an attachment, before its process may hold anything.

        Raises:
            ArenaError: the table is full.
        """
        for place in range(fmt.SESSIONS_MAX):
            if fmt.read_session(self._bytes, place) is None:
                fmt.write_session(self._bytes, place, session)
                return
        raise ArenaError(
            asked=f"attach {session.client!r}, pid {session.pid}",
            found=f"{fmt.SESSIONS_MAX} processes are attached",
            remedy="close sessions that aren't needed",
        )

    def remove_session(self, session: int) -> None:
        """Erase an attachment: no copy of its process can land any more. Idempotent."""
        for place in range(fmt.SESSIONS_MAX):
            found = fmt.read_session(self._bytes, place)
            if found is not None and found.id == session:
                fmt.write_session(self._bytes, place, None)

    # ── bytes ───────────────────────────────────────────────────────────────────────────────

    def view(self, slot: int, offset: int, nbytes: int) -> memoryview:
        """Some bytes of a slot, writable. Any thread."""
        region = next(region for region in self.regions if region.has(slot))
        assert 0 <= offset <= offset + nbytes <= region.record_bytes
        start = region.slot_offset(slot) + offset
        return self._bytes[start : start + nbytes]

    def group_of(self, slot: int) -> int:
        """Number of the record group whose region has the slot."""
        return self._groups[slot]

    def close(self) -> None:
        """Give the seat up and leave the file as it is, to be adopted. Idempotent.

        The kernel does the same for a process that is killed: nothing is tidied here either.
        """
        if self._fd < 0:
            return
        if self._index is not None:
            self._index.close()
        # Views that were handed out keep the mapping until the last of them goes.
        with contextlib.suppress(BufferError):
            self._bytes.release()
            self._map.close()
        os.close(self._fd)
        self._fd = -1

    def unlink(self) -> None:
        """Remove the file and what folders it leaves empty, then give the seat up. Idempotent.

        Processes that have mapped it keep their mapping.
        """
        if self._fd < 0:
            return
        root = self.path.parent.parent
        with folders.locked_root(root):
            if folders.is_at(self._fd, self.path):
                self.path.unlink()
            folders.remove_if_empty(self.path.parent)
            folders.remove_if_empty(root)
        self.close()


def _divide(layout: RecordLayout, capacity_bytes: int) -> tuple[Region, ...]:
    """Divide a file so that its tables and as many records as possible fit.

    More data bytes mean more slots, and those longer tables: the most data pages are searched.
    """
    fitting, too_many = 0, capacity_bytes // fmt.PAGE_BYTES + 1
    while too_many - fitting > 1:
        pages = (fitting + too_many) // 2
        if _fits(layout, pages * fmt.PAGE_BYTES, capacity_bytes):
            fitting = pages
        else:
            too_many = pages
    data_bytes = fitting * fmt.PAGE_BYTES
    regions = divide_regions(layout, data_offset=0, data_bytes=data_bytes)
    start = fmt.data_offset(sum(region.num_slots for region in regions))
    return divide_regions(layout, data_offset=start, data_bytes=data_bytes)


def _fits(layout: RecordLayout, data_bytes: int, capacity_bytes: int) -> bool:
    total = sum(group.arena_share for group in layout.groups)
    num_slots = sum(
        int(data_bytes * group.arena_share / total) // layout.shape(group.name).nbytes
        for group in layout.groups
    )
    return fmt.data_offset(num_slots) + data_bytes <= capacity_bytes


def _cells(buffer: memoryview, division: fmt.Division) -> memoryview:
    start = division.index_offset
    return buffer[start : start + division.num_cells * fmt.CELL_BYTES].cast("Q")
