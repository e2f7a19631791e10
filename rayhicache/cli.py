"""The command line: `rayhicache up | status | down | bench`.

Each command prints what it did and returns 0. A fault of the tier is told in three sentences on
stderr and returns 1; a command that can't be understood returns 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayhicache.config import DEVICES, MODELS, ClusterConfig, EngineSpec
from rayhicache.device.gpus import visible_gpus
from rayhicache.errors import (
    ClusterNotFound,
    DeviceNotFound,
    InvalidConfig,
    RayHiCacheError,
    RayNotFound,
)
from rayhicache.memory.folder import default_root
from rayhicache.memory.janitor import list_arenas, remove_tier

if TYPE_CHECKING:
    from rayhicache.actors.cluster import Cluster
    from rayhicache.actors.status import ClusterStatus, PoolStatus

WATCH_SECONDS = 2.0
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code of the process.

    Raises:
        SystemExit: with 2 for a command that can't be understood, with 0 for `--help`.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except RayHiCacheError as fault:
        print(f"Asked: {fault.asked}.", file=sys.stderr)
        print(f"Found: {fault.found.rstrip('.')}.", file=sys.stderr)
        print(f"What to do: {fault.remedy}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rayhicache", description="A key-value cache tier on a Ray cluster."
    )
    commands = parser.add_subparsers(required=True, metavar="up | status | down | bench")

    up = commands.add_parser("up", help="bring a cluster up")
    _name(up)
    where = up.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        help="of the Ray to run on, `auto` for this machine's; the cluster stays when the command "
        "has ended. Without it a Ray is started here and ends with the command",
    )
    defaults = ClusterConfig()
    where.add_argument("--local-nodes", type=int, default=defaults.local_nodes, metavar="N")
    up.add_argument(
        "--arena-bytes",
        type=_size,
        default=defaults.arena_bytes,
        metavar="SIZE",
        help="host memory of each node's pool, as in 256MiB or 8GiB (default 256MiB)",
    )
    up.add_argument("--model", choices=MODELS, default=defaults.engine.model)
    up.add_argument("--workers-per-node", type=int, default=1, metavar="N")
    _devices(up, defaults)
    up.add_argument("--page-tokens", type=int, default=defaults.page_tokens, metavar="N")
    up.add_argument("--arena-root", default="", metavar="FOLDER", help="where the arenas lie")
    up.set_defaults(run=_up)

    status = commands.add_parser("status", help="show how the pools are")
    _name(status)
    status.add_argument("--address", default="auto", help="of its Ray (default: this machine's)")
    status.add_argument("--json", action="store_true", help="print it for programs")
    status.set_defaults(run=_status)

    down = commands.add_parser("down", help="end a cluster and remove what it left on this machine")
    _name(down)
    down.add_argument("--address", default="auto", help="of its Ray (default: this machine's)")
    down.add_argument("--arena-root", default="", metavar="FOLDER", help="where the arenas lie")
    down.set_defaults(run=_down)

    bench = commands.add_parser(
        "bench", help="measure which way of copying serves which fragment size on this GPU"
    )
    bench.add_argument(
        "--out",
        type=Path,
        default=Path("copy-table.json"),
        metavar="FILE",
        help="where the table is written, for `up --copy-table` (default: copy-table.json here)",
    )
    bench.add_argument("--gpu", type=int, default=0, metavar="N", help="which GPU (default 0)")
    bench.set_defaults(run=_bench)
    return parser


def _devices(up: argparse.ArgumentParser, defaults: ClusterConfig) -> None:
    up.add_argument(
        "--device",
        choices=DEVICES,
        default=defaults.device,
        help="where workers keep their pools: auto (the default) takes a GPU on nodes that have "
        "enough of them in Ray's books, and the host elsewhere",
    )
    up.add_argument(
        "--gpus-per-worker",
        type=float,
        default=defaults.gpus_per_worker,
        metavar="PART",
        help="of one GPU, reserved with Ray for a worker: 0.5 lets two share a GPU (default 1)",
    )
    up.add_argument(
        "--copy-table",
        default=defaults.copy_table,
        metavar="FILE",
        help="what `rayhicache bench` wrote, at this path on every node; without it the table "
        "that is known for the GPU is taken",
    )


def _name(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", default="default", metavar="NAME", help="of the tier")


def _size(text: str) -> int:
    """Bytes of `256MiB`, `8GiB` or a plain number."""
    found = re.fullmatch(r"(\d+)([KMGT]iB|B|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write it as 256MiB or 8GiB")
    return int(found[1]) * UNITS[found[2]]


# ── up ──────────────────────────────────────────────────────────────────────────────────────


def _up(arguments: argparse.Namespace) -> int:
    from rayhicache.actors.cluster import launch

    config = ClusterConfig(
        name=arguments.name,
        address=arguments.address,
        local_nodes=arguments.local_nodes,
        arena_bytes=arguments.arena_bytes,
        page_tokens=arguments.page_tokens,
        engine=EngineSpec(model=arguments.model),
        workers_per_node=arguments.workers_per_node,
        device=arguments.device,
        gpus_per_worker=arguments.gpus_per_worker,
        copy_table=arguments.copy_table,
        arena_root=arguments.arena_root,
        dashboard=True,
    )
    print(f"Starting cluster {config.name!r} ...", file=sys.stderr, flush=True)
    cluster = launch(config)
    if arguments.address is not None:
        show(cluster.status())
        print(f"It stays up. End it with: rayhicache down {config.name} --address {config.address}")
        return 0
    try:
        _stay(cluster)
    finally:
        cluster.shutdown()
    print(f"Cluster {config.name!r} is down.")
    return 0


def _stay(cluster: Cluster) -> None:
    """Return on SIGINT or SIGTERM, or when somebody else has ended the cluster."""
    from rayhicache.actors.cluster import is_running

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    show(cluster.status())
    if cluster.dashboard is not None:
        print(f"Ray's dashboard, which takes jobs too: {cluster.dashboard}")
    address = f"--address {cluster.address}"
    print(f"Look at it with: rayhicache status {cluster.config.name} {address}")
    print(f"Ray's address is {cluster.address}. Ctrl-C ends the cluster and its Ray.", flush=True)
    while not ended.wait(WATCH_SECONDS) and is_running(cluster.config.name):
        pass


# ── status ──────────────────────────────────────────────────────────────────────────────────


def _status(arguments: argparse.Namespace) -> int:
    from rayhicache.actors.cluster import connect

    status = connect(arguments.name, address=arguments.address).status()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
    else:
        show(status)
    return 0


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


# ── down ────────────────────────────────────────────────────────────────────────────────────


def _down(arguments: argparse.Namespace) -> int:
    from rayhicache.actors.cluster import connect

    name, root = arguments.name, arguments.arena_root
    try:
        cluster = connect(name, address=arguments.address)
    except (RayNotFound, ClusterNotFound) as fault:
        print(f"No cluster {name!r} runs at {arguments.address!r}: {fault.found}.")
    else:
        cluster.shutdown()
        print(f"Cluster {name!r} is down.")
        root = root or cluster.config.arena_root
    folder = Path(root) if root else default_root()
    removed = remove_tier(folder, name)
    for path in removed:
        print(f"Removed {path}.")
    if not removed:
        print(f"No arena of {name!r} was left in {folder}.")
    held = [arena.path for arena in list_arenas(folder) if arena.tier == name and arena.held]
    for path in held:
        print(f"Kept {path}: a live pool holds it; name its Ray with --address.", file=sys.stderr)
    return 1 if held else 0


# ── bench ───────────────────────────────────────────────────────────────────────────────────


def _bench(arguments: argparse.Namespace) -> int:
    gpus = visible_gpus()
    if not 0 <= arguments.gpu < len(gpus):
        raise DeviceNotFound(
            asked=f"measure the ways to copy on GPU {arguments.gpu}",
            found=f"this process sees {len(gpus)} NVIDIA GPUs",
            remedy="run it on a machine with an NVIDIA GPU and driver; the cpu device needs no "
            "table",
        )
    _check_writable(arguments.out)
    from rayhicache.device.cuda.copy_table import table_text
    from rayhicache.device.cuda.measuring import Bench
    from rayhicache.device.cuda.opening import name_of
    from rayhicache.device.cuda.tuning import lines_of

    gpu = name_of(arguments.gpu)
    print(f"Measuring on {gpu}, about a minute ...", file=sys.stderr, flush=True)
    bench = Bench(arguments.gpu)
    try:
        points, choice = bench.run()
    finally:
        bench.close()
    print("\n".join(lines_of(points)))
    arguments.out.write_text(table_text(gpu, choice), encoding="utf-8")
    print(f"Wrote {arguments.out}. Use it with: rayhicache up --copy-table {arguments.out}")
    return 0


def _check_writable(path: Path) -> None:
    """Refuse before a minute is spent what could not be written afterwards."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidConfig(
            asked=f"write the table of copies to {path}",
            found="it is a folder" if path.is_dir() else f"{folder} can't be written to",
            remedy="name a file in a folder of yours with --out",
        )


if __name__ == "__main__":
    sys.exit(main())
