"""A worker whose loads come when a test lets them: for what dies in the middle of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

import clusters
from rayhicache.actors.cluster import Cluster
from rayhicache.actors.gpu_worker import GpuWorker
from rayhicache.actors.messages import WorkerReady
from rayhicache.actors.naming import worker_name
from rayhicache.actors.remote import WORKER_GROUPS, Placement, create
from rayhicache.actors.roster import seats_of_nodes
from rayhicache.actors.settings import worker_settings
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Device, Direction
from rayhicache.testing.faults import HoldingDevice
from rayhicache.wire.codec import decode, encode

NUMBER = 9


class HeldWorker(GpuWorker):
    """Its copies of one direction wait for `release`."""

    direction = Direction.LOAD

    def _device(self) -> Device:
        inner = CpuDevice(wait_seconds=self._settings.wait_seconds)
        self.holding = HoldingDevice(inner, ["kv", "index"], direction=self.direction)
        return self.holding

    def release(self) -> None:
        """Let the copies go, those to come as well."""
        self.holding.release()


class StoreHeldWorker(HeldWorker):
    """Its stores wait."""

    direction = Direction.STORE


@dataclass(frozen=True, slots=True)
class Held:
    """The worker, on its node."""

    actor: Any
    pid: int

    def run(self, tokens: list[int]) -> Any:
        """Begin; the answer's reference."""
        return clusters.begin(self.actor, tokens)

    def release(self) -> None:
        call = self.actor.release.options(concurrency_group="control").remote()
        ray.get(call, timeout=clusters.SECONDS)


@contextlib.contextmanager
def held_worker(cluster: Cluster, seat: str, kind: type[HeldWorker] = HeldWorker) -> Iterator[Held]:
    """One more worker on a node of the cluster. The router doesn't know it."""
    clusters.by_value(__name__)
    node = seats_of_nodes()[seat]
    name = worker_name(clusters.NAME, seat, NUMBER)
    actor = create(
        kind,
        name,
        Placement(threads=1, groups=WORKER_GROUPS, node=node),
        encode(worker_settings(cluster.config, seat, node, name)),
    )
    try:
        ready = decode(ray.get(actor.ready.remote(), timeout=clusters.SECONDS), WorkerReady)
        yield Held(actor, ready.pid)
    finally:
        ray.kill(actor, no_restart=True)
