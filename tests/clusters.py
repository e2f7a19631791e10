"""Words for tests with Ray: the one cluster that they share, and its parts by name."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from rayhicache.actors.calls import ActorGone, ask
from rayhicache.actors.cluster import Cluster, launch
from rayhicache.actors.messages import PartResult, WorkerReady
from rayhicache.actors.naming import (
    NAMESPACE,
    controller_name,
    directory_name,
    pool_name,
    worker_name,
)
from rayhicache.actors.status import PoolStatus
from rayhicache.config import ClusterConfig, EngineSpec, Limits
from rayhicache.core.jobs import Assignment
from rayhicache.core.keys import page_keys
from rayhicache.wire.codec import decode, encode
from rayhicache.wire.messages import pack_keys

NAME = "shared"
SEATS = ("node0", "node1")
PAGE = 16
ENGINE = EngineSpec(vocab_size=512, num_blocks=48, max_positions=768)
LIMITS = Limits(
    ready_seconds=60.0,
    call_seconds=3.0,
    pull_seconds=6.0,
    lease_seconds=10.0,
    part_seconds=60.0,
    queue_max=8,
    tries_max=2,
    chunk_bytes=64 << 10,
)
SECONDS = 40.0
ROOT = Path(f"/dev/shm/rhc-{secrets.token_hex(4)}")
CONFIG = ClusterConfig(
    name=NAME,
    local_nodes=len(SEATS),
    arena_bytes=8 << 20,
    page_tokens=PAGE,
    engine=ENGINE,
    arena_root=str(ROOT),
    limits=LIMITS,
)


@contextlib.contextmanager
def shared_cluster() -> Iterator[Cluster]:
    """Two nodes; everything that was started is gone afterwards."""
    cluster = launch(CONFIG)
    try:
        yield cluster
    finally:
        cluster.shutdown()
    assert not ROOT.exists()


def prompt(number: int, length: int = 6 * PAGE + 5) -> list[int]:
    """Token ids that only this number gives."""
    dice = random.Random(number)
    return [dice.randrange(ENGINE.vocab_size) for _ in range(length)]


def worker(seat: str, number: int = 0) -> Any:
    return ray.get_actor(worker_name(NAME, seat, number), namespace=NAMESPACE)


def pool(seat: str) -> Any:
    return ray.get_actor(pool_name(NAME, seat), namespace=NAMESPACE)


def directory() -> Any:
    return ray.get_actor(directory_name(NAME), namespace=NAMESPACE)


def controller() -> Any:
    return ray.get_actor(controller_name(NAME), namespace=NAMESPACE)


def begin(actor: Any, tokens: list[int], max_new_tokens: int = 4) -> Any:
    """Send a prompt to that very worker; the reference of its answer."""
    run = Assignment(
        job="direct", part=0, attempt=1, prompt=tuple(tokens), max_new_tokens=max_new_tokens
    )
    return actor.run.remote(encode(run))


def finish(ref: Any) -> PartResult:
    return decode(ray.get(ref, timeout=SECONDS), PartResult)


def run_on(seat: str, tokens: list[int], max_new_tokens: int = 4) -> PartResult:
    """Answer on that node; what it stores is committed when this returns."""
    result = finish(begin(worker(seat), tokens, max_new_tokens))
    call = worker(seat).settle.options(concurrency_group="control").remote(SECONDS)
    assert ray.get(call, timeout=SECONDS)
    return result


def _own_pid(_actor: object) -> int:
    return os.getpid()


def by_value(module: str) -> None:
    """Send what a module of tests defines whole: the actors' processes can't import it."""
    cloudpickle.register_pickle_by_value(sys.modules[module])  # type: ignore[no-untyped-call]  # ray's own gap


by_value(__name__)


def pid_of(actor: Any) -> int:
    """Of the process that the actor lives in now; waits for one that is being restarted."""
    found: list[int] = []

    def answers() -> bool:
        with contextlib.suppress(ActorGone):
            found.append(ask(actor, "__ray_call__", _own_pid, what="ask for its pid", timeout=5.0))
        return bool(found)

    assert eventually(answers)
    return found[0]


def kill(pid: int) -> None:
    """kill -9, and gone when this returns."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid))
    os.close(pidfd)


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat[stat.rindex(")") + 2] == "Z"


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is there and does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def worker_pid(seat: str) -> int:
    ready = decode(ray.get(worker(seat).ready.remote(), timeout=SECONDS), WorkerReady)
    return ready.pid


def at(cluster: Cluster, seat: str) -> PoolStatus:
    """How a node's pool is."""
    found: list[PoolStatus] = []

    def answers() -> bool:
        found.extend(one for one in cluster.status().pools if one.seat == seat)
        return bool(found)

    assert eventually(answers)
    return found[0]


def known_at(seat: str, tokens: list[int]) -> bool:
    """Whether the directory knows the whole pages of a prompt at that node."""
    ready = decode(ray.get(worker(seat).ready.remote(), timeout=SECONDS), WorkerReady)
    keys = page_keys(ready.seed, tokens, PAGE)
    counts = ask(directory(), "counts", pack_keys(keys), what="ask", timeout=SECONDS)
    return bool(counts.get(seat, 0) == len(keys))


def is_well(cluster: Cluster) -> bool:
    """All is up, registered and attached, and nothing is held by anybody."""
    status = cluster.status()
    return (
        not status.unreachable
        and all(one.available for one in status.workers)
        and all(not one.filling + one.leased + one.sealed for one in status.pools)
        and all(len(one.sessions) == 1 for one in status.pools)
    )


def eventually(holds: Callable[[], bool], *, within: float = SECONDS) -> bool:
    """Ask again until it holds; for what other processes do in their own time."""
    pause = threading.Event()
    for _ in range(int(within / 0.05)):
        if holds():
            return True
        pause.wait(0.05)
    return holds()
