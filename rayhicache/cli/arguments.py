"""What the commands take, and what they say about it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rayhicache.cli import commands
from rayhicache.cli.showing import UNITS
from rayhicache.config import DEVICES, MODELS, ClusterConfig


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run` of what it parses is the command's function."""
    parser = argparse.ArgumentParser(
        prog="rayhicache",
        description="A key-value cache tier on a Ray cluster: pools of host memory, one a node, "
        "and workers that restore prompt prefixes from them. Begin with `rayhicache up`.",
    )
    each = parser.add_subparsers(required=True, metavar="up | status | down | bench")
    _add_up(
        each.add_parser(
            "up",
            help="bring a cluster up: a pool and workers on every node of a Ray",
            description="Bring a cluster up: a pool and workers on every node of a Ray. Without "
            "--address a Ray is started on this machine, and the command stays until Ctrl-C.",
        )
    )

    status = each.add_parser("status", help="show how the pools and workers are")
    _name(status)
    _address(status)
    status.add_argument("--json", action="store_true", help="print all of it as JSON")
    status.set_defaults(run=commands.status)

    down = each.add_parser("down", help="end a cluster and remove what it left on this machine")
    _name(down)
    _address(down)
    _arena_root(down)
    down.set_defaults(run=commands.down)

    bench = each.add_parser(
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
    bench.set_defaults(run=commands.bench)
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    defaults = ClusterConfig()
    _name(up)
    where = up.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        help="of the Ray to run on, HOST:PORT, or `auto` for the one that runs on this machine; "
        "the cluster stays when the command has ended. Without it a Ray is started here and ends "
        "with the command",
    )
    where.add_argument(
        "--local-nodes",
        type=int,
        default=defaults.local_nodes,
        metavar="N",
        help="nodes of the Ray that is started here, each with a pool and workers (default 1)",
    )
    up.add_argument(
        "--arena-bytes",
        type=_size,
        default=defaults.arena_bytes,
        metavar="SIZE",
        help="host memory of each node's pool, as in 256MiB or 8GiB (default 256MiB)",
    )
    up.add_argument(
        "--model",
        choices=MODELS,
        default=defaults.engine.model,
        help="what the workers run, with random weights, made on the spot (default %(default)s)",
    )
    up.add_argument(
        "--workers-per-node",
        type=int,
        default=1,
        metavar="N",
        help="workers on each node, each with an engine; 0 for engines of your own (default 1)",
    )
    _devices(up, defaults)
    up.add_argument(
        "--page-tokens",
        type=int,
        default=defaults.page_tokens,
        metavar="N",
        help="tokens of a page, which is stored and restored as a whole (default %(default)s)",
    )
    _arena_root(up)
    up.set_defaults(run=commands.up)


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
        type=Path,
        metavar="FILE",
        help="what `rayhicache bench` wrote, at this path on every node; without it the table "
        "that is known for the GPU is taken",
    )


def _name(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name",
        nargs="?",
        default="default",
        metavar="NAME",
        help="of the cluster; several run beside each other under their names (default: default)",
    )


def _address(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--address",
        default="auto",
        help="of the Ray that the cluster runs on, as `rayhicache up` told it (default: auto, the "
        "one that was started last on this machine)",
    )


def _arena_root(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--arena-root",
        default="",
        metavar="FOLDER",
        help="folder in memory where the nodes' arenas lie (default: /dev/shm/rayhicache-<uid>)",
    )


def _size(text: str) -> int:
    """Bytes of `256MiB`, `8GiB` or a plain number."""
    found = re.fullmatch(r"(\d+)([KMGT]iB|B|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write it as 256MiB or 8GiB")
    return int(found[1]) * UNITS[found[2]]
