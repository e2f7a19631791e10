"""What the commands do. Ray and what a GPU needs are imported where they are used."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rayhicache.cli.showing import show
from rayhicache.config import ClusterConfig, EngineSpec
from rayhicache.device.gpus import visible_gpus
from rayhicache.errors import ClusterNotFound, DeviceNotFound, InvalidConfig, RayNotFound
from rayhicache.memory.folder import default_root
from rayhicache.memory.janitor import list_arenas, remove_tier

if TYPE_CHECKING:
    from rayhicache.actors.cluster import Cluster

WATCH_SECONDS = 2.0


def up(arguments: argparse.Namespace) -> int:
    """Bring a cluster up; stay with it if its Ray was started here."""
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
        # Workers have another working directory than this command.
        copy_table=str(arguments.copy_table.absolute()) if arguments.copy_table else "",
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


def status(arguments: argparse.Namespace) -> int:
    """Show how a cluster is."""
    from rayhicache.actors.cluster import connect

    found = connect(arguments.name, address=arguments.address).status()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        show(found)
    return 0


def down(arguments: argparse.Namespace) -> int:
    """End a cluster, and remove what it left on this machine."""
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


def bench(arguments: argparse.Namespace) -> int:
    """Measure the ways to copy and write the table."""
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
