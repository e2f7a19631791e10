"""What can't be done is told by one typed error that says what to do, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

import clusters
import rayhicache as hc
from clusters import CONFIG, NAME, PAGE, at, prompt
from rayhicache.actors.calls import ActorGone, ask
from rayhicache.actors.gpu_worker import GpuWorker
from rayhicache.actors.link import RayPort
from rayhicache.actors.local_ray import join
from rayhicache.actors.naming import worker_name
from rayhicache.actors.remote import WORKER_GROUPS, Placement, create
from rayhicache.actors.roster import named_actors, seats_of_nodes
from rayhicache.actors.settings import worker_settings
from rayhicache.errors import (
    ArenaError,
    ArenaTooLarge,
    ClusterClosed,
    ClusterExists,
    ClusterNotFound,
    LaunchFailed,
    LayoutMismatch,
    NoLocalPool,
    RayHiCacheError,
    RayNotFound,
    UnknownModel,
)
from rayhicache.wire.codec import encode

SECONDS = clusters.SECONDS


def says_three_things(error: pytest.ExceptionInfo[RayHiCacheError]) -> bool:
    return bool(error.value.asked and error.value.found and error.value.remedy)


# ── without Ray ─────────────────────────────────────────────────────────────────────────────


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match="glm-dsa-tiny") as error:
        hc.EngineSpec(model="gpt-9")
    assert says_three_things(error)


def test_a_call_after_ray_was_left_starts_no_other_ray() -> None:
    """`ray.init` fails in this test; Ray's own calls would have come to it."""

    class Handle:
        def __getattr__(self, name: str) -> Any:
            return pytest.fail("the call was sent")

    with pytest.raises(ActorGone, match="has left Ray"):
        ask(Handle(), "status", what="ask", timeout=1.0)


PROGRAM = """
import json, sys, time
import rayhicache as hc
from rayhicache.errors import RayHiCacheError
begun = time.monotonic()
try:
    hc.{call}
except RayHiCacheError as fault:
    told = [type(fault).__name__, fault.asked, fault.found, fault.remedy]
    print(json.dumps([*told, time.monotonic() - begun]))
"""


@pytest.mark.parametrize(
    "call",
    [
        'launch(hc.ClusterConfig(address="127.0.0.1:1"))',
        'connect("default", address="127.0.0.1:1")',
        'launch(hc.ClusterConfig(address="no-such-host.invalid:6379"))',
    ],
)
def test_no_ray_at_the_address_is_told_within_seconds(call: str) -> None:
    program = PROGRAM.format(call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    kind, asked, found, remedy, seconds = json.loads(done.stdout)
    assert kind == "RayNotFound"
    assert "join the Ray at" in asked
    assert found
    assert "ray start" in remedy
    assert seconds < 20


# ── on the shared Ray ───────────────────────────────────────────────────────────────────────


@pytest.mark.ray
def test_a_second_launch_under_one_name_is_refused_and_harms_nothing(cluster: hc.Cluster) -> None:
    for config in (CONFIG, replace(CONFIG, address=cluster.address)):
        with pytest.raises(ClusterExists, match=NAME) as error:
            hc.launch(config)
        assert f"rayhicache down {NAME}" in error.value.remedy
    assert clusters.is_well(cluster)


@pytest.mark.ray
def test_a_process_joins_one_ray(cluster: hc.Cluster) -> None:
    with pytest.raises(LaunchFailed, match="joined one already") as error:
        hc.launch(replace(CONFIG, name="other"))
    assert says_three_things(error)
    with pytest.raises(RayNotFound, match="has joined the one at"):
        join("127.0.0.1:1")
    join("auto")
    join(cluster.address)


def leaves_nothing(name: str, root: Path) -> bool:
    return not named_actors(name) and not list(root.glob(f"{name}/*"))


@pytest.mark.ray
def test_an_arena_that_rays_books_do_not_have_is_refused_at_once(cluster: hc.Cluster) -> None:
    config = replace(CONFIG, name="large", address=cluster.address, arena_bytes=1 << 40)
    begun = time.monotonic()
    with pytest.raises(ArenaTooLarge, match="Ray's books") as error:
        hc.launch(config)
    assert time.monotonic() - begun < 30
    assert says_three_things(error)
    assert clusters.eventually(lambda: leaves_nothing("large", clusters.ROOT))


@pytest.mark.ray
def test_a_launch_whose_pools_can_not_come_up_leaves_nothing(
    cluster: hc.Cluster, tmp_path: Path
) -> None:
    """Half-way: the directory is up, the pools are made and say why they can't."""
    open_to_all = tmp_path / "arenas"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    config = replace(CONFIG, name="halfway", address=cluster.address, arena_root=str(open_to_all))
    with pytest.raises(ArenaError, match="mode 777") as error:
        hc.launch(config)
    assert "chmod 700" in error.value.remedy
    assert clusters.eventually(lambda: leaves_nothing("halfway", open_to_all))
    with pytest.raises(ClusterNotFound):
        hc.connect("halfway", address=cluster.address)


@pytest.mark.ray
def test_another_layout_on_one_pool_is_refused_with_the_command_that_removes_the_arena(
    cluster: hc.Cluster,
) -> None:
    """R27."""
    other = replace(CONFIG, engine=replace(CONFIG.engine, model="llama-tiny"))
    name = worker_name(NAME, "node0", 8)
    node = seats_of_nodes()["node0"]
    actor = create(
        GpuWorker,
        name,
        Placement(threads=1, groups=WORKER_GROUPS, node=node),
        encode(worker_settings(other, "node0", node, name)),
    )
    try:
        with pytest.raises(LayoutMismatch) as error:
            ask(actor, "ready", what="wait for the worker", timeout=SECONDS)
        assert f"rayhicache down {NAME}" in error.value.remedy
        assert len(at(cluster, "node0").sessions) == 1
    finally:
        ray.kill(actor, no_restart=True)


@pytest.mark.ray
def test_a_node_without_a_pool_is_told(cluster: hc.Cluster) -> None:
    with pytest.raises(NoLocalPool, match="node7") as error:
        RayPort(NAME, "node7", client="test", call_seconds=1.0, pull_seconds=1.0)
    assert says_three_things(error)


@pytest.mark.ray
def test_nothing_is_left_after_a_shutdown_and_a_job_for_it_is_refused(cluster: hc.Cluster) -> None:
    """Two clusters stand on one Ray; the other one goes on."""
    config = replace(CONFIG, name="brief", address=cluster.address, arena_bytes=2 << 20)
    other = hc.launch(config)
    job = other.submit(hc.GenerateJob(prompts=[prompt(1, PAGE)] * 2, max_new_tokens=700))
    next(job.stream())
    pids = [session.pid for pool in other.status().pools for session in pool.sessions]
    pids += [
        clusters.pid_of(actor)
        for name, actor in named_actors("brief").items()
        if "/worker/" not in name
    ]
    assert len(pids) == 5
    assert (clusters.ROOT / "brief").is_dir()
    second = hc.connect("brief", address=cluster.address)
    begun = time.monotonic()
    other.shutdown()
    other.shutdown()
    assert time.monotonic() - begun < 20, "a job that runs doesn't hold it up"
    assert clusters.eventually(lambda: leaves_nothing("brief", clusters.ROOT))
    assert not (clusters.ROOT / "brief").exists()
    assert clusters.eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    for closed in (other, second):
        with pytest.raises(ClusterClosed) as error:
            closed.submit(hc.GenerateJob(prompts=[[1]]))
        assert says_three_things(error)
        with pytest.raises(ClusterClosed):
            closed.status()
    with pytest.raises(ClusterClosed):
        job.result(SECONDS)
    assert clusters.is_well(cluster)


@pytest.mark.ray
def test_a_shutdown_while_the_controller_is_dead_ends_everything_too(cluster: hc.Cluster) -> None:
    config = replace(CONFIG, name="headless", address=cluster.address, arena_bytes=2 << 20)
    other = hc.launch(config)
    handle = ray.get_actor("headless/controller", namespace="rayhicache")
    clusters.kill(clusters.pid_of(handle))
    other.shutdown()
    assert clusters.eventually(lambda: leaves_nothing("headless", clusters.ROOT))
    assert clusters.is_well(cluster)
