"""A Ray-native key-value cache tier for serving large language models.

    import rayhicache as hc

    with hc.launch(hc.ClusterConfig(local_nodes=2)) as cluster:
        job = cluster.submit(hc.GenerateJob(prompts=["Hello"], max_new_tokens=32))
        print(job.result(timeout=60).outputs[0].text)

Names are imported when they are first used, so a process that only needs the client or the
errors doesn't load Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayhicache.actors.cluster import Cluster, connect, launch
    from rayhicache.actors.job import GenerateJob, Job, JobResult, Output, StreamedToken
    from rayhicache.actors.status import ClusterStatus, PoolStatus, SessionStatus, WorkerStatus
    from rayhicache.client import TierClient
    from rayhicache.config import ClusterConfig, EngineSpec, Limits
    from rayhicache.requests import Found, Load, ModelIdentity, Prompt

_HOMES = {
    "rayhicache.actors.cluster": ("Cluster", "connect", "launch"),
    "rayhicache.actors.job": ("GenerateJob", "Job", "JobResult", "Output", "StreamedToken"),
    "rayhicache.actors.status": ("ClusterStatus", "PoolStatus", "SessionStatus", "WorkerStatus"),
    "rayhicache.client": ("TierClient",),
    "rayhicache.config": ("ClusterConfig", "EngineSpec", "Limits"),
    "rayhicache.requests": ("Found", "Load", "ModelIdentity", "Prompt"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cluster",
    "ClusterConfig",
    "ClusterStatus",
    "EngineSpec",
    "Found",
    "GenerateJob",
    "Job",
    "JobResult",
    "Limits",
    "Load",
    "ModelIdentity",
    "Output",
    "PoolStatus",
    "Prompt",
    "SessionStatus",
    "StreamedToken",
    "TierClient",
    "WorkerStatus",
    "connect",
    "launch",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home at first use."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
