"""What an actor is made with. Messages, since they cross processes."""

from __future__ import annotations

from dataclasses import dataclass

from rayhicache.config import ClusterConfig, EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Of an `L2Pool`; see `ClusterConfig` and `Limits` for what the fields mean."""

    cluster: str
    seat: str
    node: str
    arena_root: str
    arena_bytes: int
    call_seconds: float
    pull_seconds: float
    lease_seconds: float
    chunk_bytes: int
    chunks_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Of a `GpuWorker`; see `ClusterConfig` and `Limits` for what the fields mean."""

    cluster: str
    seat: str
    node: str
    name: str
    page_tokens: int
    engine: EngineSpec
    device: str
    copy_table: str
    call_seconds: float
    pull_seconds: float
    wait_seconds: float
    copy_seconds: float


def pool_settings(config: ClusterConfig, seat: str, node: str) -> PoolSettings:
    """Settings of one seat's pool."""
    limits = config.limits
    return PoolSettings(
        cluster=config.name,
        seat=seat,
        node=node,
        arena_root=config.arena_root,
        arena_bytes=config.arena_bytes,
        call_seconds=limits.call_seconds,
        pull_seconds=limits.pull_seconds,
        lease_seconds=limits.lease_seconds,
        chunk_bytes=limits.chunk_bytes,
        chunks_in_flight=limits.chunks_in_flight,
    )


def worker_settings(config: ClusterConfig, seat: str, node: str, name: str) -> WorkerSettings:
    """Settings of one worker."""
    limits = config.limits
    return WorkerSettings(
        cluster=config.name,
        seat=seat,
        node=node,
        name=name,
        page_tokens=config.page_tokens,
        engine=config.engine,
        device=config.device,
        copy_table=config.copy_table,
        call_seconds=limits.call_seconds,
        pull_seconds=limits.pull_seconds,
        wait_seconds=limits.wait_seconds,
        copy_seconds=limits.copy_seconds,
    )
