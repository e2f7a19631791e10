"""Which worker serves a prompt: a pure function of what is known when it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the router knows of a worker that has registered.

    Attributes:
        id: of the worker.
        queued_tokens: prompt tokens before it, running ones included.
        local_tokens: restorable from its own node.
        remote_tokens: further tokens that its node could pull from another.
    """

    id: str
    queued_tokens: int
    local_tokens: int
    remote_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Relative costs of one prompt token: computed, restored locally, pulled and restored."""

    compute: float = 1.0
    local: float = 0.02
    remote: float = 0.1


def route(prompt_tokens: int, workers: Sequence[WorkerView], costs: Costs) -> str | None:
    """The worker that has the prompt ready first, or None if there is no worker.

    So the longest restorable prefix wins, until its worker's queue is longer than another's by
    more than the prefix saves; the other one then pulls the prefix. Ties go to the shorter
    queue, then to the first name, so equal inputs give equal choices.
    """
    if not workers:
        return None

    def key(worker: WorkerView) -> tuple[float, int, str]:
        computed = max(prompt_tokens - worker.local_tokens - worker.remote_tokens, 0)
        ready = (
            (worker.queued_tokens + computed) * costs.compute
            + worker.local_tokens * costs.local
            + worker.remote_tokens * costs.remote
        )
        return (ready, worker.queued_tokens, worker.id)

    return min(workers, key=key).id
