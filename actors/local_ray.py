"""Ray on this machine: joined, or started with several nodes for a cluster of one's own."""

from __future__ import annotations

import logging
import shutil
import tempfile
from typing import Any

import ray
from ray.cluster_utils import Cluster as RayCluster

from rayhicache.actors.naming import NAMESPACE, SEAT_LABEL
from rayhicache.config import ClusterConfig
from rayhicache.errors import RayNotFound

# A node that died is known after about a second instead of fourteen.
HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 700,
    "health_check_failure_threshold": 3,
}
BOOK_MEMORY = 1 << 30
CPUS = 4


def join(address: str) -> None:
    """Join the Ray at an address, unless this process has joined one already.

    Raises:
        RayNotFound: none answers there.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, ValueError, RuntimeError) as fault:
        raise RayNotFound(
            asked=f"join the Ray at {address!r}",
            found=str(fault).splitlines()[0],
            remedy="start it (`ray start --head`), name its address, or leave the address out to "
            "start a local one",
        ) from fault


class LocalRay:
    """Several Ray nodes on this machine; they end with `stop` or with this process.

    Nodes are labelled with their seats, so an arena is found again by the same node.
    """

    def __init__(self, config: ClusterConfig) -> None:
        # Socket paths are limited to 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="rhc-", dir="/tmp")
        self._cluster: Any = RayCluster()
        common: dict[str, Any] = {
            "num_cpus": CPUS,
            "memory": config.arena_bytes + BOOK_MEMORY,
            "object_store_memory": config.object_store_bytes,
        }
        for number in range(config.local_nodes):
            options = {**common, "labels": {SEAT_LABEL: f"node{number}"}}
            if number == 0:
                options |= {"temp_dir": self._folder, "_system_config": HEALTH}
            self._cluster.add_node(**options)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        """What `join` and `connect` take."""
        address: str = self._cluster.address
        return address

    def stop(self) -> None:
        """Leave Ray and end its processes. Idempotent."""
        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
