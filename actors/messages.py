"""The messages of the actors, beside those of `rayhicache.wire`. Importing this registers them."""

from __future__ import annotations

from dataclasses import dataclass

from rayhicache.actors.settings import PoolSettings, WorkerSettings
from rayhicache.actors.status import ClusterStatus, PoolStatus
from rayhicache.config import ClusterConfig
from rayhicache.core.jobs import Assignment, PartReport, PartUpdate
from rayhicache.core.keys import PageKey
from rayhicache.memory.port import Attachment, OpenSlots
from rayhicache.memory.process import ProcessIdentity
from rayhicache.transport.protocol import ChunkRequest, PeerLease
from rayhicache.wire.codec import register


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A `GenerateJob` on its way: one of the two kinds of prompts is empty."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker registers.

    Attributes:
        seed: parent of the first page's key of every prompt, for the router.
        longest: prompt and answer, in tokens, that it can serve.
        device: where its pools are, for people: `cpu`, or `cuda` and the GPU's name.
    """

    name: str
    seat: str
    pid: int
    seed: PageKey
    longest: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """All tokens of a part, and how it was served."""

    tokens: tuple[int, ...]
    report: PartReport


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is new of a job, one update per part."""

    parts: tuple[PartUpdate, ...]


register(
    {
        "assignment": Assignment,
        "attachment": Attachment,
        "chunk_request": ChunkRequest,
        "cluster_config": ClusterConfig,
        "cluster_status": ClusterStatus,
        "news": News,
        "open_slots": OpenSlots,
        "part_result": PartResult,
        "peer_lease": PeerLease,
        "pool_settings": PoolSettings,
        "pool_status": PoolStatus,
        "process": ProcessIdentity,
        "submission": Submission,
        "worker_ready": WorkerReady,
        "worker_settings": WorkerSettings,
    }
)
