"""The port over Ray: limits, answers that come late, and pools that don't know their sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import ray

import clusters
from clusters import (
    LIMITS,
    NAME,
    PAGE,
    at,
    by_value,
    eventually,
    pid_of,
    pool,
    prompt,
    run_on,
    worker,
)
from rayhicache.actors.calls import ask
from rayhicache.actors.cluster import Cluster
from rayhicache.actors.l2_pool import L2Pool
from rayhicache.actors.link import RayPort
from rayhicache.actors.naming import worker_name
from rayhicache.core.layout import RecordLayout
from rayhicache.core.slots import Session
from rayhicache.errors import PoolUnreachable, SessionEnded
from rayhicache.memory.port import OpenSlots

pytestmark = pytest.mark.ray
by_value(__name__)


def inside(seat: str, look: Callable[[Any], Any]) -> Any:
    """What a function says of the pool's owner, in the pool's process."""
    return ask(pool(seat), "__ray_call__", look, what="look inside", timeout=clusters.SECONDS)


def recovering(actor: L2Pool) -> tuple[int, ...]:
    return actor._owner.recovering()


def sessions(actor: L2Pool) -> tuple[Session, ...]:
    return actor._owner.sessions()


def layout(actor: L2Pool) -> RecordLayout | None:
    return actor._owner.layout


def nothing_open() -> OpenSlots:
    return OpenSlots(reading=(), writing=())


def a_port() -> RayPort:
    return RayPort(NAME, "node0", client="test", call_seconds=LIMITS.call_seconds, pull_seconds=1.0)


def test_a_stopped_pool_costs_a_limit_and_what_it_does_later_is_undone(cluster: Cluster) -> None:
    """R28: the lookup's lease and the store's slots are granted when nobody waits any more."""
    cold = run_on("node0", prompt(200))
    with clusters.stopped(pid_of(pool("node0"))):
        run = clusters.begin(worker("node0"), [*prompt(200), *prompt(201)])
        slow = clusters.finish(run)
        assert slow.report.restored_local_tokens == 0
        settle = worker("node0").settle.options(concurrency_group="control")
        assert ray.get(settle.remote(clusters.SECONDS), timeout=clusters.SECONDS)
    assert eventually(lambda: at(cluster, "node0").leased + at(cluster, "node0").filling == 0)
    again = run_on("node0", prompt(200))
    assert again.tokens == cold.tokens
    assert again.report.restored_local_tokens == 6 * PAGE


def test_a_port_closed_while_its_pool_is_down_is_not_waited_for(cluster: Cluster) -> None:
    run_on("node0", prompt(210, PAGE))
    port = a_port()
    attachment = port.attach(inside("node0", layout), nothing_open)
    epoch = at(cluster, "node0").epoch
    clusters.kill(pid_of(pool("node0")))
    with contextlib.suppress(PoolUnreachable):  # it may be back already
        port.close()
    assert eventually(lambda: at(cluster, "node0").epoch == epoch + 1)
    assert eventually(lambda: inside("node0", recovering) == ())
    assert attachment.session not in {one.id for one in inside("node0", sessions)}


def test_a_port_that_is_closed_says_so(cluster: Cluster) -> None:
    port = a_port()
    with pytest.raises(SessionEnded, match="not attached"):
        port.reserve([], parent=None)
    port.attach(inside("node0", layout), nothing_open)
    port.close()
    port.close()
    with pytest.raises(SessionEnded):
        port.reserve([], parent=None)


def test_a_session_that_the_next_life_does_not_know_is_opened_anew(cluster: Cluster) -> None:
    cold = run_on("node1", prompt(220))
    mine = worker_name(NAME, "node1", 0)
    (session,) = [one for one in inside("node1", sessions) if one.client == mine]
    ask(pool("node1"), "detach", session.id, what="detach", timeout=clusters.SECONDS)
    clusters.kill(pid_of(pool("node1")))
    assert eventually(lambda: [s.client for s in at(cluster, "node1").sessions] == [mine])
    again = run_on("node1", prompt(220))
    assert again.report.restored_local_tokens == 6 * PAGE
    assert again.tokens == cold.tokens
