"""From measurements to a table of copies: which way costs a forward the least. Pure.

a forward:   |--- compute, as long as the copy at the link's limit ---|
beside it:   |======= copy, perhaps slower than the limit =======|
together:    |---- compute, slowed down while the copy runs -----|--- the rest ---|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rayhicache.device.cuda.choice import CopyChoice, Shares
from rayhicache.device.protocols import Direction

TIE = 1.01
ALL_BYTES = 1 << 40
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement.

    Attributes:
        fragment_bytes: of every fragment that was moved.
        kernel_share: of the fragments that the kernel moved; the copy engine moved the rest.
        copy_seconds: of the whole move, alone.
        limit_seconds: of as many bytes in one contiguous copy.
        slowdown: of a matrix product while such moves run all the time, over its time alone.
        moved_bytes: by the move.
    """

    direction: Direction
    fragment_bytes: int
    kernel_share: float
    copy_seconds: float
    limit_seconds: float
    slowdown: float
    moved_bytes: int

    @property
    def forward(self) -> float:
        """Time of a forward beside the copy, over its time alone.

        Its compute alone takes as long as the copy would at the link's limit. It ends when both
        have ended.
        """
        done = self.copy_seconds / self.slowdown
        left = max(self.limit_seconds - done, 0.0)
        return (self.copy_seconds + left) / self.limit_seconds

    @property
    def bytes_per_second(self) -> float:
        """Of the move alone."""
        return self.moved_bytes / self.copy_seconds


def best(points: Sequence[Point]) -> Point:
    """The point with the shortest forward; within a hundredth the one that takes fewer SMs."""
    shortest = min(point.forward for point in points)
    alike = [point for point in points if point.forward <= TIE * shortest]
    return min(alike, key=lambda point: point.kernel_share)


def shares_of(points: Sequence[Point], direction: Direction) -> Shares:
    """The rows of a table for one direction; `points` has every share of every size measured.

    A row ends half way to the next size. What is above the largest goes as the largest did.
    """
    mine = [point for point in points if point.direction is direction]
    sizes = sorted({point.fragment_bytes for point in mine})
    chosen = [
        best([point for point in mine if point.fragment_bytes == size]).kernel_share
        for size in sizes
    ]
    ends = [(low + high) // 2 for low, high in pairwise(sizes)] + [ALL_BYTES] * bool(sizes)
    rows: list[tuple[int, float]] = []
    for end, share in zip(ends, chosen, strict=True):
        if rows and rows[-1][1] == share:
            rows.pop()
        rows.append((end, share))
    # Above the last row all goes to the copy engine, so rows that say so are left out.
    if rows and not rows[-1][1]:
        rows.pop()
    return tuple(rows)


def choice_of(points: Sequence[Point], *, blocks_beside: int, blocks_alone: int) -> CopyChoice:
    """The table that these measurements make."""
    return CopyChoice(
        load=shares_of(points, Direction.LOAD),
        store=shares_of(points, Direction.STORE),
        blocks_beside=blocks_beside,
        blocks_alone=blocks_alone,
    )


def lines_of(points: Sequence[Point]) -> list[str]:
    """The measurements for people: GB/s and the forward's time, the best of each size marked."""
    lines = []
    for direction in Direction:
        mine = [point for point in points if point.direction is direction]
        if not mine:
            continue
        shares = sorted({point.kernel_share for point in mine})
        heads = [_head(share) for share in shares]
        lines.append(f"{direction.value}: GB/s, and a forward's time beside it over alone")
        lines.append("  fragment  " + "  ".join(f"{head:>11}" for head in heads))
        for size in sorted({point.fragment_bytes for point in mine}):
            row = [point for point in mine if point.fragment_bytes == size]
            chosen = best(row)
            cells = [
                f"{point.bytes_per_second / GIGABYTE:5.1f} {point.forward:4.2f}"
                f"{'*' if point is chosen else ' '}"
                for point in sorted(row, key=lambda point: point.kernel_share)
            ]
            lines.append(f"{size:>10,}  " + "  ".join(f"{cell:>11}" for cell in cells))
    return lines


def _head(share: float) -> str:
    if not share:
        return "copy engine"
    return "kernel" if share == 1 else f"{share:.0%} kernel"
