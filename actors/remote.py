"""Plain classes as Ray actors, and where they are placed. The only place with `ray.remote`.

Concurrency groups keep calls that may take long from starving short ones; who decides is the one
mutex inside each actor. Nothing is retried by Ray: a call that may have happened isn't repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayhicache.actors.naming import NAMESPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How an actor runs.

    Attributes:
        threads: of calls that name no group.
        groups: threads of each concurrency group.
        node: Ray's id of the node that it is bound to; an actor bound to a node that is gone
            fails at once instead of moving.
        memory: bytes that count against the node's memory in Ray's books.
        gpus: of the node's GPUs in Ray's books. Ray shows the actor the one that it was given.
    """

    threads: int
    groups: Mapping[str, int] = field(default_factory=dict)
    node: str | None = None
    memory: int = 0
    gpus: float = 0.0


POOL_GROUPS = {"pull": 8, "peer": 8, "control": 2}
WORKER_GROUPS = {"control": 2}
# One thread for what workers tell: a worker's tokens are to come in order.
CONTROLLER_GROUPS = {"workers": 1, "news": 64, "control": 2}


def create(kind: type, name: str, placement: Placement, *args: object) -> Any:
    """Create a detached, named actor of a plain class; Ray restarts it for ever.

    Raises:
        ActorAlreadyExistsError: there is an actor of that name.
    """
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": placement.threads,
    }
    if placement.memory:
        options["memory"] = placement.memory
    if placement.gpus:
        options["num_gpus"] = placement.gpus
    if placement.node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            node_id=placement.node, soft=False
        )
    # Ray's own annotations don't know this argument of its decorator.
    decorate: Any = ray.remote
    actor = decorate(concurrency_groups=dict(placement.groups))(kind)
    return actor.options(**options).remote(*args)
