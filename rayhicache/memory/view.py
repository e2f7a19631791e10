"""What a worker sees of its node's arena: the same memory, mapped."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from rayhicache.core.keys import PageKey
from rayhicache.errors import ArenaError
from rayhicache.memory import format as fmt
from rayhicache.memory.key_index import KeyIndex
from rayhicache.memory.port import Attachment


class ArenaView:
    """A mapping of the arena, for reading and writing the records of slots that are held.

    It stays valid when the owner dies, restarts, or unlinks the file. Any thread may call.
    """

    def __init__(self, attachment: Attachment, mapped: mmap.mmap) -> None:
        self.attachment = attachment
        self._map = mapped
        self._bytes = memoryview(mapped)
        self._regions = {region.group: region for region in attachment.regions}
        self._numbers = {region.group: at for at, region in enumerate(attachment.regions)}
        stored = fmt.read_division(self._bytes)
        assert stored is not None, "an attachment is given after the layout was fixed"
        division, _ = stored
        start = division.index_offset
        cells = self._bytes[start : start + division.num_cells * fmt.CELL_BYTES]
        self._index = KeyIndex(cells.cast("Q"))

    @classmethod
    def open(cls, attachment: Attachment) -> ArenaView:
        """Map the arena that the owner named.

        Raises:
            ArenaError: the file there is another one: gone, replaced, or not its mapping.
        """
        path = Path(attachment.path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as fault:
            raise _not_it(path, fault.strerror or str(fault)) from fault
        try:
            found = os.fstat(fd)
            if found.st_ino != attachment.inode:
                raise _not_it(path, f"inode {found.st_ino} instead of {attachment.inode}")
            mapped = mmap.mmap(fd, found.st_size)
        finally:
            os.close(fd)
        with memoryview(mapped) as view:
            identity = fmt.read_identity(view)
        # Checked in the mapping itself: that is what will be read and written.
        if identity is None or identity.uuid != attachment.uuid:
            mapped.close()
            raise _not_it(path, "it has another uuid")
        return cls(attachment, mapped)

    def region(self, group: str) -> memoryview:
        """uint8[num_slots * record_bytes]: all slots of a group, writable."""
        region = self._regions[group]
        return self._bytes[region.offset : region.offset + region.num_slots * region.record_bytes]

    def epoch(self) -> int:
        """The owner's present life, read from the arena without a call."""
        return fmt.read_epoch(self._bytes)

    def probe(self, keys: Sequence[PageKey], group: str = "full") -> int:
        """How many leading keys seem to be READY, without a call: a hint, a lease is the truth."""
        return self._index.count_present(keys, self._numbers[group])

    def close(self) -> None:
        """Unmap, once no view of a region is left; the caller uses none any more. Idempotent."""
        self._index.close()
        with contextlib.suppress(BufferError):
            self._bytes.release()
            self._map.close()


def _not_it(path: Path, found: str) -> ArenaError:
    return ArenaError(
        asked=f"map the arena {path}",
        found=found,
        remedy="attach again: its owner was replaced",
    )
