"""Which prefixes can be restored from the records that are there.

A group answers with a set of lengths, not with one: of a recurrent state 5 pages may be
restorable while 4 are not. The sets of several groups are intersected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayhicache.core.layout import GroupSpec, HitPolicy, RecordLayout
from rayhicache.core.slots import SlotRef


def needed_pages(group: GroupSpec, page_tokens: int, length: int) -> range:
    """Pages of a group whose records a prefix of `length` pages needs."""
    if group.policy is HitPolicy.ALL_PAGES:
        return range(length)
    if group.policy is HitPolicy.TRAILING_PAGES:
        # The next token sees itself and window - 1 tokens before it.
        pages = -(-(group.window_tokens - 1) // page_tokens)
        return range(max(0, length - pages), length)
    return range(max(0, length - 1), length)


def restorable_lengths(
    layout: RecordLayout, num_pages: int, present: Mapping[str, Iterable[bool]]
) -> Sequence[int]:
    """Lengths in pages, ascending, without 0, of the prefixes that every group can restore.

    Args:
        num_pages: of the prompt.
        present: per group, whether the record of each page is there; read no further than needed.
    """
    lengths: Sequence[int] = range(1, num_pages + 1)
    for group in layout.groups:
        has = present[group.name]
        if group.policy is HitPolicy.ALL_PAGES:
            whole = next((page for page, there in enumerate(has) if not there), num_pages)
            lengths = (
                range(1, min(whole, len(lengths)) + 1)
                if isinstance(lengths, range)
                else [length for length in lengths if length <= whole]
            )
        else:
            there = list(has)
            lengths = [
                length
                for length in lengths
                if all(there[page] for page in needed_pages(group, layout.page_tokens, length))
            ]
    return lengths


def pages_to_lease(layout: RecordLayout, lengths: Sequence[int]) -> dict[str, list[int]]:
    """Per group, the pages whose records a reader may want that restores one of `lengths`."""
    return {
        group.name: list(needed_pages(group, layout.page_tokens, lengths[-1]))
        if group.policy is HitPolicy.ALL_PAGES
        else sorted(
            {page for length in lengths for page in needed_pages(group, layout.page_tokens, length)}
        )
        for group in layout.groups
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to read records, until `release`, the session's end or the deadline.

    Attributes:
        id: unique in one life of the tier.
        session: id of the holder.
        records: per group, the leased records by page number of the prompt.
        deadline: on the tier's clock, for readers of other nodes; None for local sessions.
    """

    id: int
    session: int
    records: Mapping[str, Mapping[int, SlotRef]]
    deadline: float | None = None

    def refs(self) -> list[SlotRef]:
        """All leased records."""
        return [ref for pages in self.records.values() for ref in pages.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a lookup found. An empty hit has no lease and nothing to release.

    Attributes:
        lengths: restorable lengths in pages, ascending, without 0.
        lease: on every record that some of these lengths need.
        pulled: how many of the pages came from another node for this lookup.
    """

    lengths: Sequence[int]
    lease: Lease | None
    pulled: int = 0

    @property
    def best(self) -> int:
        """The longest restorable length in pages, 0 for a miss."""
        return self.lengths[-1] if self.lengths else 0


MISS = Hit(lengths=(), lease=None)
