"""The actors of a cluster: brought up together, known by name, taken down together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError

from rayhicache.actors.calls import ActorGone, answer
from rayhicache.actors.directory import Directory
from rayhicache.actors.gpu_worker import GpuWorker
from rayhicache.actors.l2_pool import L2Pool
from rayhicache.actors.messages import WorkerReady
from rayhicache.actors.naming import (
    NAMESPACE,
    SEAT_LABEL,
    directory_name,
    pool_name,
    worker_name,
)
from rayhicache.actors.remote import POOL_GROUPS, WORKER_GROUPS, Placement, create
from rayhicache.actors.settings import pool_settings, worker_settings
from rayhicache.config import ClusterConfig
from rayhicache.errors import LaunchFailed, RayHiCacheError
from rayhicache.wire.codec import decode, encode

log = logging.getLogger(__name__)


def seats_of_nodes() -> dict[str, str]:
    """A stable name for each live node, and Ray's present id of it.

    The node's label if it has one, else its host's name, numbered where a host has several.
    """
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # ray's own gap
    nodes = sorted(
        (node for node in known if node["Alive"]),
        key=lambda node: (node["NodeManagerHostname"], node["NodeID"]),
    )
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


@dataclass(slots=True)
class Roster:
    """The pools, workers and directory of one cluster. Filled by `start`, on one thread."""

    config: ClusterConfig
    directory: Any = None
    pools: dict[str, Any] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)
    registered: dict[str, WorkerReady] = field(default_factory=dict)

    def start(self) -> None:
        """Bring everything up, or find it by name if this is a later life of the controller.

        Raises:
            RayHiCacheError: what an actor says, or `LaunchFailed`. What had come up stays until
                `stop`.
        """
        config = self.config
        self.directory = self._found_or_made(
            Directory, directory_name(config.name), Placement(threads=4)
        )
        seats = seats_of_nodes()
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
                    Placement(threads=1, groups=WORKER_GROUPS, node=node),
                    encode(worker_settings(config, seat, node, name)),
                )
        for name in self.workers:
            self.register(name)

    def register(self, name: str) -> WorkerReady:
        """Wait until a worker is up; only then is it routed to.

        Raises:
            RayHiCacheError: why it isn't.
        """
        ready = decode(self._await(f"worker {name!r}", self.workers[name]), WorkerReady)
        self.registered[name] = ready
        return ready

    def stop(self) -> None:
        """Close and end every actor, workers first; the arenas are removed. Idempotent."""
        for name, worker in self.workers.items():
            self._close(f"worker {name!r}", worker)
        for seat, pool in self.pools.items():
            self._close(f"pool of seat {seat!r}", pool)
        for actor in (*self.workers.values(), *self.pools.values(), self.directory):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        self.workers.clear()
        self.pools.clear()
        self.registered.clear()
        self.directory = None

    def _found_or_made(self, kind: type, name: str, placement: Placement, *args: bytes) -> Any:
        try:
            return create(kind, name, placement, *args)
        except ActorAlreadyExistsError:
            return ray.get_actor(name, namespace=NAMESPACE)

    def _await(self, what: str, actor: Any) -> Any:
        try:
            return answer(
                actor.ready.remote(), f"wait for the {what}", self.config.limits.ready_seconds
            )
        except ActorGone as fault:
            raise LaunchFailed(
                asked=fault.asked,
                found=fault.found,
                remedy="see the actor's log; a node may have too little memory in Ray's books, "
                "or the project isn't installed there",
            ) from fault

    def _close(self, what: str, actor: Any) -> None:
        try:
            call = actor.close.options(concurrency_group="control").remote()
            answer(call, f"close the {what}", self.config.limits.call_seconds)
        except RayHiCacheError as fault:
            log.warning("ending the %s without its goodbye: %s", what, fault)
