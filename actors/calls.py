"""One way to call an actor: with a limit, and with typed faults instead of Ray's."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rayhicache.errors import RayHiCacheError


class ActorGone(RayHiCacheError):
    """An actor is dead, restarting, cut off, or doesn't answer within its limit."""


def answer(ref: ray.ObjectRef[Any], what: str, timeout: float | None) -> Any:
    """Wait for an actor's answer.

    Raises:
        RayHiCacheError: the callee's own typed fault, as it raised it.
        ActorGone: no answer.
    """
    try:
        return ray.get(ref, timeout=timeout)
    except GetTimeoutError as fault:
        raise _gone(what, f"no answer within {timeout} s") from fault
    except RayTaskError as fault:
        # Ray wraps what a callee raised; a typed fault goes on as itself.
        if isinstance(fault.cause, RayHiCacheError):
            raise fault.cause from None
        raise
    except RayActorError as fault:
        raise _gone(what, str(fault).splitlines()[0]) from fault


def _gone(what: str, found: str) -> ActorGone:
    return ActorGone(
        asked=what,
        found=found,
        remedy="try again: Ray restarts the actor; `rayhicache status` tells how it is",
    )
