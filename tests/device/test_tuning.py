"""From measurements to a table of copies: the way that costs a forward the least."""

from __future__ import annotations

import pytest

from rayhicache.device.cuda.copy_table import parse_table, table_text
from rayhicache.device.cuda.tuning import Point, best, choice_of, lines_of, shares_of
from rayhicache.device.protocols import Direction

LIMIT = 50e9


def point(
    size: int,
    share: float,
    *,
    of_limit: float = 1.0,
    slowdown: float = 1.0,
    direction: Direction = Direction.LOAD,
) -> Point:
    """A move of a second at the link's limit."""
    return Point(
        direction=direction,
        fragment_bytes=size,
        kernel_share=share,
        copy_seconds=1 / of_limit,
        limit_seconds=1.0,
        slowdown=slowdown,
        moved_bytes=int(LIMIT),
    )


@pytest.mark.parametrize(
    ("of_limit", "slowdown", "forward"),
    [
        (1.0, 1.0, 1.0),  # nothing in the way of each other
        (1.0, 2.0, 1.5),  # half of the compute is left when the copy ends
        (0.5, 1.0, 2.0),  # the compute has long ended
        (0.5, 2.0, 2.0),  # both end together
        (0.5, 4.0, 2.5),
    ],
)
def test_a_forward_ends_when_its_compute_and_its_copy_have(
    of_limit: float, slowdown: float, forward: float
) -> None:
    assert point(4096, 0.0, of_limit=of_limit, slowdown=slowdown).forward == pytest.approx(forward)


def test_the_shortest_forward_wins_and_of_those_alike_the_one_with_fewer_sms() -> None:
    engine = point(4096, 0.0, of_limit=0.5)
    shared = point(4096, 0.4, of_limit=0.995)
    kernel = point(4096, 1.0, of_limit=1.0)
    assert best([kernel, engine, shared]) is shared
    assert best([kernel, engine]) is kernel


def table(chosen: dict[int, float]) -> list[Point]:
    """Measurements in which these shares are the best for these sizes."""
    return [
        point(size, share, of_limit=1.0 if share == wanted else 0.3)
        for size, wanted in chosen.items()
        for share in (0.0, 0.5, 1.0)
    ]


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [
        ({4: 0.0, 8: 0.0}, ()),
        ({4: 1.0, 8: 0.0}, ((6, 1.0),)),
        ({4: 1.0, 8: 1.0, 16: 0.0}, ((12, 1.0),)),
        ({4: 1.0, 8: 0.5, 16: 0.0}, ((6, 1.0), (12, 0.5))),
        ({4: 0.0, 8: 1.0, 16: 0.0}, ((6, 0.0), (12, 1.0))),
        ({4: 0.0, 8: 1.0}, ((6, 0.0), (1 << 40, 1.0))),
    ],
)
def test_a_row_ends_half_way_to_the_next_size(
    chosen: dict[int, float], rows: tuple[tuple[int, float], ...]
) -> None:
    points = table(chosen)
    assert shares_of(points, Direction.LOAD) == rows
    choice = choice_of(points, blocks_beside=3, blocks_alone=8)
    assert (choice.load, choice.store) == (rows, ())
    for size, share in chosen.items():
        assert choice.kernel_rows(Direction.LOAD, size, 10) == 10 * share
    assert parse_table(table_text("NVIDIA X", choice), "x") == ("NVIDIA X", choice)


def test_the_printed_table_marks_one_way_per_size_and_direction() -> None:
    points = table({4096: 1.0, 65_536: 0.0})
    points += [point(4096, 0.0, direction=Direction.STORE)]
    lines = lines_of(points)
    assert [line.count("*") for line in lines] == [0, 0, 1, 1, 0, 0, 1]
    assert all(len(line) <= 80 for line in lines)
    assert " 50.0 1.00*" in lines[2]
