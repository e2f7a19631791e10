"""How much of a GPU each worker reserves, decided from Ray's books before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rayhicache.config import ClusterConfig
from rayhicache.device.gpus import visible_gpus
from rayhicache.errors import DeviceNotFound

log = logging.getLogger(__name__)

# A third of a GPU three times is a whole one, whatever the rounding.
ROUNDING = 1e-6


def worker_gpus(
    config: ClusterConfig, books: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Per seat, the part of a GPU that each of its workers reserves; 0 puts them on the host.

    Args:
        books: per seat, all resources of its node as Ray counts them.

    Raises:
        DeviceNotFound: `cuda` was asked, and a node has too few GPUs for its workers.
    """
    return {seat: _part(config, seat, int(node.get("GPU", 0))) for seat, node in books.items()}


def local_gpus(num_nodes: int) -> list[tuple[str, ...]]:
    """This machine's GPUs, divided between the nodes of a local Ray.

    Nodes share GPUs where there are fewer: such nodes stand for machines of their own.
    """
    gpus = visible_gpus()
    if len(gpus) >= num_nodes:
        return [gpus[node::num_nodes] for node in range(num_nodes)]
    return [gpus[node % len(gpus) :][:1] if gpus else () for node in range(num_nodes)]


def check_local_gpus(config: ClusterConfig) -> None:
    """Refuse `cuda` on a local Ray that this machine has too few GPUs for.

    Raises:
        DeviceNotFound: as `worker_gpus`.
    """
    if config.device == "cuda":
        nodes = local_gpus(config.local_nodes)
        worker_gpus(config, {f"node{at}": {"GPU": len(gpus)} for at, gpus in enumerate(nodes)})


def _part(config: ClusterConfig, seat: str, gpus: int) -> float:
    if config.device == "cpu":
        return 0.0
    part = float(config.gpus_per_worker)
    if gpus * int(1 / part + ROUNDING) >= config.workers_per_node:
        return part
    wanted = f"{config.workers_per_node} workers with {part:g} of a GPU each"
    if config.device == "cuda":
        raise DeviceNotFound(
            asked=f"start {wanted} on the node of seat {seat!r}",
            found=f"it has {gpus} GPUs in Ray's books",
            remedy="start fewer workers a node, let them share (gpus_per_worker), start the node "
            "with `--num-gpus`, or choose the device auto, which takes the host there",
        )
    if gpus:
        log.warning("seat %s has %d GPUs, too few for %s: they run on the host", seat, gpus, wanted)
    return 0.0
