"""A cluster's status, printed for people."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayhicache.actors.status import ClusterStatus, PoolStatus

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
ROWS = (
    "seat",
    "capacity",
    "used slots",
    "filling",
    "leased",
    "sealed",
    "pages hit",
    "pages missed",
    "pages evicted",
    "epoch",
    "sessions",
)
NAME_WIDTH, SEAT_WIDTH = 18, 20


def show(status: ClusterStatus) -> None:
    """Print a cluster's status, a column per seat, as many beside each other as fit."""
    width = shutil.get_terminal_size((80, 24)).columns
    beside = max((width - NAME_WIDTH) // SEAT_WIDTH, 1)
    columns = [_column(pool) for pool in status.pools]
    groups = [columns[at : at + beside] for at in range(0, len(columns), beside)]
    for group in groups:
        _show_seats(f"cluster {status.name}", list(zip(ROWS, *group, strict=True)))
    for line in _lines(status):
        print(line)


def _show_seats(title: str, rows: list[tuple[str, ...]]) -> None:
    """One table: drawn where `rich` is installed, else as plain columns."""
    if importlib.util.find_spec("rich") is None:
        print(title)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for at, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if at else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=shutil.get_terminal_size((80, 24)).columns).print(table)


def _column(pool: PoolStatus) -> tuple[str, ...]:
    stopped = sum(session.stopped for session in pool.sessions)
    sessions = f"{len(pool.sessions)}, {stopped} stopped" if stopped else f"{len(pool.sessions)}"
    numbers = (
        f"{pool.used:,} of {pool.slots:,}",
        *(
            f"{number:,}"
            for number in (
                pool.filling,
                pool.leased,
                pool.sealed,
                pool.hits,
                pool.misses,
                pool.evictions,
                pool.epoch,
            )
        ),
    )
    return (pool.seat, _bytes(pool.capacity_bytes), *numbers, sessions)


def _lines(status: ClusterStatus) -> list[str]:
    """What stands under the table."""
    lines = [f"Seat {seat}: its pool doesn't answer." for seat in status.unreachable]
    lines += [
        f"Seat {pool.seat}: process {session.pid} ({session.client}) is stopped and keeps its "
        "leases."
        for pool in status.pools
        for session in pool.sessions
        if session.stopped
    ]
    sized = [pool for pool in status.pools if pool.token_bytes]
    if sized:
        tokens = sum(pool.tokens_fit for pool in sized)
        lines.append(
            f"A token takes {sized[0].token_bytes:,.0f} B; {tokens:,} tokens fit, "
            f"in records of {sized[0].page_tokens} tokens."
        )
    lines += [
        f"Worker {worker.name} is on {worker.device}"
        f"{'.' if worker.available else ', and away: it gets no prompts until it is back.'}"
        for worker in status.workers
    ]
    available = sum(worker.available for worker in status.workers)
    lines.append(
        f"{available} of {len(status.workers)} workers take work; {status.running} prompts run, "
        f"{status.queued} wait."
    )
    return lines


def _bytes(number: int) -> str:
    unit = max((unit for unit in UNITS if UNITS[unit] <= max(number, 1)), key=lambda u: UNITS[u])
    return f"{number / UNITS[unit]:,.4g} {unit or 'B'}"
