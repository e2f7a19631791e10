"""What `Cluster.status()` answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus:
    """A process that is attached to a pool. A stopped one keeps its leases."""

    client: str
    pid: int
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """One node's pool. Slots and pages are counts, sums are of this epoch.

    Attributes:
        seat, node: its stable name, and Ray's id of the node that it is on now.
        epoch: lives of the pool's process over one arena.
        capacity_bytes: of the arena.
        slots: records that fit; `used` are READY, `leased` of them are being read, `filling` are
            being written, `sealed` were given up while copies may still land.
        hits, misses, stored, evictions: pages.
        token_bytes: host memory that one token takes; 0 until a worker has attached.
        tokens_fit: tokens that fit in the arena.
        sessions: the processes attached.
    """

    seat: str
    node: str
    epoch: int
    capacity_bytes: int
    slots: int
    used: int
    filling: int
    leased: int
    sealed: int
    hits: int
    misses: int
    stored: int
    evictions: int
    page_tokens: int
    token_bytes: float
    tokens_fit: int
    sessions: tuple[SessionStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker.

    Attributes:
        device: where its pools are: `cpu`, or `cuda` and the GPU's name.
        queued_tokens: of prompts that wait for it or run on it.
    """

    name: str
    seat: str
    device: str
    available: bool
    queued_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The whole cluster.

    Attributes:
        name: of the cluster.
        pools: of the nodes whose pool answered.
        unreachable: seats whose pool didn't.
        workers: all that are registered.
        queued, running: prompts.
    """

    name: str
    pools: tuple[PoolStatus, ...]
    unreachable: tuple[str, ...]
    workers: tuple[WorkerStatus, ...]
    queued: int
    running: int
