"""The actors of a cluster: brought up together, known by name, taken down together."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError

from rayhicache.actors.calls import ActorGone, ActorSlow, answer, ask, start
from rayhicache.actors.devices import worker_gpus
from rayhicache.actors.directory import Directory
from rayhicache.actors.gpu_worker import GpuWorker
from rayhicache.actors.l2_pool import L2Pool
from rayhicache.actors.messages import WorkerReady
from rayhicache.actors.naming import (
    NAMESPACE,
    SEAT_LABEL,
    controller_name,
    directory_name,
    is_of,
    is_pool,
    is_worker,
    pool_name,
    worker_name,
)
from rayhicache.actors.remote import POOL_GROUPS, WORKER_GROUPS, Placement, create
from rayhicache.actors.settings import pool_settings, worker_settings
from rayhicache.actors.status import PoolStatus
from rayhicache.config import ClusterConfig
from rayhicache.errors import ArenaTooLarge, ClusterClosed, LaunchFailed, RayHiCacheError
from rayhicache.wire.codec import decode, encode

log = logging.getLogger(__name__)


def seats_of_nodes() -> dict[str, str]:
    """A stable name for each live node, and Ray's present id of it.

    The node's label if it has one, else its host's name, numbered where a host has several.
    """
    nodes = sorted(live_nodes(), key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))
    seats: dict[str, str] = {}
    for node in nodes:
        name = node.get("Labels", {}).get(SEAT_LABEL) or node["NodeManagerHostname"]
        number = 1
        seat = name
        while seat in seats:
            number += 1
            seat = f"{name}-{number}"
        seats[seat] = node["NodeID"]
    return seats


def live_nodes() -> list[dict[str, Any]]:
    """Ray's nodes that are alive, as it describes them."""
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # ray's own gap
    return [node for node in known if node["Alive"]]


def books_of(seats: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Per seat, all resources of its node as Ray counts them; nodes that are gone have none."""
    nodes = {node["NodeID"]: node["Resources"] for node in live_nodes()}
    return {seat: nodes.get(node, {}) for seat, node in seats.items()}


def end_actors(cluster: str, call_seconds: float) -> None:
    """End every actor of a cluster but its controller: those that Ray knows, by name.

    Workers say goodbye first, then pools, which remove their arenas. Idempotent.
    """
    # Never by a list of one's own: it may be of another life, or not whole yet.
    found = named_actors(cluster)
    workers = {name: actor for name, actor in found.items() if is_worker(cluster, name)}
    pools = {name: actor for name, actor in found.items() if is_pool(cluster, name)}
    for group in (workers, pools):
        calls = {
            name: start(actor, "close", what=f"close {name!r}", group="control")
            for name, actor in group.items()
        }
        for name, call in calls.items():
            try:
                answer(call, f"close {name!r}", call_seconds)
            except RayHiCacheError as fault:
                log.warning("ending %s without its goodbye: %s", name, fault)
    for actor in found.values():
        ray.kill(actor, no_restart=True)


def named_actors(cluster: str) -> dict[str, Any]:
    """The live actors of a cluster but its controller, by name."""
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    found = {}
    for entry in named:
        name = entry["name"]
        if entry["namespace"] == NAMESPACE and is_of(cluster, name):
            # One that has just ended is gone.
            with contextlib.suppress(ValueError):
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    found.pop(controller_name(cluster), None)
    return found


@dataclass(slots=True)
class Roster:
    """The pools, workers and directory of one cluster. Filled by `start`, on one thread.

    `stop` may come from another one, in the middle of a start too.
    """

    config: ClusterConfig
    directory: Any = None
    pools: dict[str, Any] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)
    registered: dict[str, WorkerReady] = field(default_factory=dict)
    _stopped: bool = False
    _making: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Bring everything up, or find it by name if this is a later life of the controller.

        Raises:
            RayHiCacheError: what an actor says, or `LaunchFailed`. What had come up stays until
                `stop`.
        """
        config = self.config
        seats = seats_of_nodes()
        gpus = worker_gpus(config, books_of(seats))
        self.directory = self._found_or_made(
            Directory, directory_name(config.name), Placement(threads=4)
        )
        self._check_memory(seats)
        for seat, node in seats.items():
            self.pools[seat] = self._found_or_made(
                L2Pool,
                pool_name(config.name, seat),
                Placement(threads=8, groups=POOL_GROUPS, node=node, memory=config.arena_bytes),
                encode(pool_settings(config, seat, node)),
            )
        self._await("directory", self.directory)
        for seat, pool in self.pools.items():
            self._await(f"pool of seat {seat!r}", pool)
        for seat, node in seats.items():
            for number in range(config.workers_per_node):
                name = worker_name(config.name, seat, number)
                self.workers[name] = self._found_or_made(
                    GpuWorker,
                    name,
                    Placement(threads=1, groups=WORKER_GROUPS, node=node, gpus=gpus[seat]),
                    encode(worker_settings(config, seat, node, name)),
                )
        for name in self.workers:
            self.register(name, config.limits.ready_seconds)

    def register(self, name: str, timeout: float) -> WorkerReady:
        """Wait until a worker is up; only then is it routed to.

        Raises:
            RayHiCacheError: why it isn't.
        """
        ready = decode(self._await(f"worker {name!r}", self.workers[name], timeout), WorkerReady)
        self.registered[name] = ready
        return ready

    def pool_statuses(self) -> tuple[tuple[PoolStatus, ...], tuple[str, ...]]:
        """How the pools are, and the seats of those without a usable answer."""
        calls = {
            seat: start(pool, "status", what=f"ask seat {seat!r}", group="control")
            for seat, pool in self.pools.items()
        }
        found, unreachable = [], []
        for seat, call in calls.items():
            try:
                status = answer(call, f"ask seat {seat!r}", self.config.limits.call_seconds)
                found.append(decode(status, PoolStatus))
            except RayHiCacheError as fault:
                log.warning("status without seat %s: %s", seat, fault)
                unreachable.append(seat)
        return tuple(found), tuple(unreachable)

    def settle(self, timeout: float) -> bool:
        """Wait until every worker's stores so far are committed; False on time-out."""
        calls = [
            start(worker, "settle", timeout, what="settle a worker", group="control")
            for worker in self.workers.values()
        ]
        deadline = time.monotonic() + timeout + self.config.limits.call_seconds
        return all([_settled(call, deadline) for call in calls])

    def stop(self) -> None:
        """End every actor; the arenas are removed. Idempotent. A start under way fails."""
        with self._making:
            self._stopped = True
        end_actors(self.config.name, self.config.limits.call_seconds)

    def _found_or_made(self, kind: type, name: str, placement: Placement, *args: bytes) -> Any:
        with self._making:
            if self._stopped:
                raise ClusterClosed(
                    asked=f"start {name!r}",
                    found="the cluster is being shut down",
                    remedy="launch it anew",
                )
            try:
                return create(kind, name, placement, *args)
            except ActorAlreadyExistsError:
                return ray.get_actor(name, namespace=NAMESPACE)

    def _check_memory(self, seats: Mapping[str, str]) -> None:
        """Ray would let an actor that fits no node wait for ever."""
        nodes = {node["NodeID"]: node for node in live_nodes()}
        for seat, node in seats.items():
            books = int(nodes[node]["Resources"].get("memory", 0))
            if books < self.config.arena_bytes:
                raise ArenaTooLarge(
                    asked=f"give seat {seat!r} an arena of {self.config.arena_bytes:,} B",
                    found=f"Ray's books give its node {books:,} B of memory",
                    remedy="choose smaller arena_bytes, or start the node with more `--memory`",
                )

    def _await(self, what: str, actor: Any, timeout: float | None = None) -> Any:
        limit = self.config.limits.ready_seconds if timeout is None else timeout
        try:
            return ask(actor, "ready", what=f"wait for the {what}", timeout=limit)
        except ActorGone as fault:
            raise LaunchFailed(
                asked=fault.asked,
                found=fault.found,
                remedy="see the actor's log; a node may have too little memory or no free GPU in "
                "Ray's books (the device cpu needs none), or the project isn't installed there",
            ) from fault


def _settled(call: Any, deadline: float) -> bool:
    try:
        return bool(answer(call, "settle a worker", max(deadline - time.monotonic(), 0)))
    except ActorSlow:
        return False
    except ActorGone as fault:
        # A worker that is gone stores nothing more, and its session has ended.
        log.warning("%s", fault)
        return True
