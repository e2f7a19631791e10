"""The suite of transports, between processes through Ray."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import clusters
from rayhicache.actors.cluster import Cluster
from rayhicache.actors.l2_pool import L2Pool
from rayhicache.actors.link import RayPort
from rayhicache.actors.naming import pool_name
from rayhicache.actors.ray_transport import RayTransport
from rayhicache.actors.remote import POOL_GROUPS, Placement, create
from rayhicache.actors.roster import seats_of_nodes
from rayhicache.actors.settings import PoolSettings
from rayhicache.errors import PoolUnreachable
from rayhicache.memory.port import OpenSlots
from rayhicache.memory.view import ArenaView
from rayhicache.testing.transport_conformance import Peer, TransportConformance, small_layouts
from rayhicache.wire.codec import encode

pytestmark = pytest.mark.ray
TIER = "wire"
LAYOUTS = ("sparse-index", "one-odd-layer")


@contextlib.contextmanager
def ray_peer(seat: str, root: Path) -> Iterator[Peer]:
    """A pool in a process of its own, with this process attached to it as a worker."""
    layout = small_layouts()[seat.removeprefix("doomed-")]
    settings = PoolSettings(
        cluster=TIER,
        seat=seat,
        node="",
        arena_root=str(root),
        arena_bytes=1 << 20,
        call_seconds=2.0,
        pull_seconds=5.0,
        lease_seconds=60.0,
        chunk_bytes=1 << 16,
        chunks_in_flight=2,
    )
    node = next(iter(seats_of_nodes().values()))
    placement = Placement(threads=4, groups=POOL_GROUPS, node=node)
    actor = create(L2Pool, pool_name(TIER, seat), placement, encode(settings))
    try:
        ray.get(actor.ready.remote(), timeout=clusters.SECONDS)
        port = RayPort(TIER, seat, client="test", call_seconds=10.0, pull_seconds=1.0)
        attachment = port.attach(layout, lambda: OpenSlots(reading=(), writing=()))
        pid = clusters.pid_of(actor)
        yield Peer(
            transport=RayTransport(TIER),
            seat=seat,
            port=port,
            view=ArenaView.open(attachment),
            region=attachment.regions[0],
            layout=layout,
            muted=lambda: clusters.stopped(pid),
            kill=lambda: ray.kill(actor, no_restart=True),
        )
        with contextlib.suppress(PoolUnreachable, ray.exceptions.RayActorError):
            port.close()
            ray.get(actor.close.remote(), timeout=clusters.SECONDS)
    finally:
        ray.kill(actor, no_restart=True)
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module", params=LAYOUTS)
def peer(running_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Peer]:
    with ray_peer(request.param, clusters.ROOT.with_suffix(".wire")) as found:
        yield found


@pytest.fixture
def doomed(running_cluster: Cluster) -> Iterator[Peer]:
    with ray_peer("doomed-sparse-index", clusters.ROOT.with_suffix(".doomed")) as found:
        yield found


class TestRayTransport(TransportConformance):
    """See the suite."""
