"""Names of a cluster's actors. All are detached, in one Ray namespace, found by name."""

from __future__ import annotations

NAMESPACE = "rayhicache"
SEAT_LABEL = "rayhicache-seat"


def controller_name(cluster: str) -> str:
    """Name of a cluster's controller; whoever creates it owns the cluster's name."""
    return f"{cluster}/controller"


def pool_name(cluster: str, seat: str) -> str:
    """Name of a seat's pool."""
    return f"{cluster}/pool/{seat}"


def directory_name(cluster: str) -> str:
    """Name of the directory's only shard."""
    return f"{cluster}/directory/0"


def worker_name(cluster: str, seat: str, number: int) -> str:
    """Name of one of a seat's workers."""
    return f"{cluster}/worker/{seat}/{number}"


def is_of(cluster: str, name: str) -> bool:
    """Whether an actor is of that cluster: names of clusters have no slash."""
    return name.startswith(f"{cluster}/")


def is_worker(cluster: str, name: str) -> bool:
    """Whether an actor is a worker of that cluster."""
    return name.startswith(f"{cluster}/worker/")


def is_pool(cluster: str, name: str) -> bool:
    """Whether an actor is a pool of that cluster."""
    return name.startswith(f"{cluster}/pool/")
