"""Workers on a GPU through Ray: what one stored, its next life and its neighbour hit."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhicache.device.gpus import visible_gpus

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not visible_gpus(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not HAS_RAY, reason="needs Ray"),
]

if HAS_RAY:
    import ray

    import clusters
    import rayhicache as hc
    from rayhicache.actors.calls import ActorGone, ask
    from rayhicache.actors.messages import PartResult, WorkerReady
    from rayhicache.actors.naming import NAMESPACE, worker_name
    from rayhicache.cli.showing import show
    from rayhicache.wire.codec import decode

NAME, SEAT, PAGE, PAGES, NEW = "gpu", "node0", 64, 6, 24
SECONDS = 120.0


def prompt(seed: int) -> list[int]:
    """Six pages and five tokens that only this seed gives."""
    dice = random.Random(seed)
    return [dice.randrange(512) for _ in range(PAGES * PAGE + 5)]


@pytest.fixture(scope="module")
def pair() -> Iterator[hc.Cluster]:
    """One node with two workers that share the first GPU."""
    config = hc.ClusterConfig(
        name=NAME,
        arena_bytes=64 << 20,
        page_tokens=PAGE,
        engine=hc.EngineSpec(vocab_size=512, num_blocks=24, max_positions=1024),
        workers_per_node=2,
        device="cuda",
        gpus_per_worker=0.5,
        arena_root=f"/dev/shm/rhc-{secrets.token_hex(4)}",
        limits=hc.Limits(call_seconds=5.0, ready_seconds=SECONDS),
    )
    with hc.launch(config) as cluster:
        yield cluster
    assert not Path(config.arena_root).exists()


def worker(number: int) -> Any:
    return ray.get_actor(worker_name(NAME, SEAT, number), namespace=NAMESPACE)


def ready(number: int, *, not_pid: int = 0) -> WorkerReady:
    """A worker's registration, once it is up in another process than that one."""
    found: list[WorkerReady] = []

    def is_up() -> bool:
        with contextlib.suppress(ActorGone):
            told = ask(worker(number), "ready", what="wait for a worker", timeout=10.0)
            found.append(decode(told, WorkerReady))
        return bool(found) and found[-1].pid != not_pid

    assert clusters.eventually(is_up, within=SECONDS)
    return found[-1]


def run_on(number: int, tokens: list[int]) -> PartResult:
    """Answer on that very worker; what it stores is committed when this returns."""
    result = clusters.finish(clusters.begin(worker(number), tokens, NEW))
    call = worker(number).settle.options(concurrency_group="control").remote(SECONDS)
    assert ray.get(call, timeout=SECONDS)
    return result


def stored(cluster: hc.Cluster) -> int:
    """Pages that the node's pool was given so far."""
    (pool,) = cluster.status().pools
    return pool.stored


def arena_in(pid: int) -> set[tuple[str, str]]:
    """Inode and path of every arena that a process has mapped."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {(line[4], line[5]) for line in lines if line[-1].endswith(".arena")}


def test_a_job_runs_on_a_gpu_and_status_says_so(
    pair: hc.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job = pair.submit(hc.GenerateJob(prompts=[prompt(1)], max_new_tokens=NEW))
    (output,) = job.result(SECONDS).outputs
    assert len(output.tokens) == NEW
    assert output.report.recomputed_tokens == len(prompt(1))
    told = [one.device for one in pair.status().workers]
    assert len(told) == 2
    assert all(one.startswith("cuda, NVIDIA") for one in told)
    show(pair.status())
    assert f"Worker {worker_name(NAME, SEAT, 1)} is on {told[1]}." in capsys.readouterr().out
    resources: Any = ray  # whose own annotations leave these two out
    free = resources.available_resources().get("GPU", 0)
    assert free == resources.cluster_resources()["GPU"] - 1


def test_a_killed_worker_comes_back_and_hits_what_it_had_stored(pair: hc.Cluster) -> None:
    cold = run_on(0, prompt(2))
    assert cold.report.restored_local_tokens == 0
    before, first = stored(pair), ready(0)
    clusters.kill(first.pid)
    second = ready(0, not_pid=first.pid)
    assert second.device == first.device
    warm = run_on(0, prompt(2))
    assert warm.report.restored_local_tokens == PAGES * PAGE
    assert warm.tokens == cold.tokens
    assert stored(pair) == before, "nothing had to be stored again"


def test_the_other_worker_of_the_node_hits_the_very_same_bytes(pair: hc.Cluster) -> None:
    """No copy of host bytes: both processes map one file, and no page is stored twice."""
    cold = run_on(0, prompt(3))
    before = stored(pair)
    warm = run_on(1, prompt(3))
    assert warm.report.restored_local_tokens == PAGES * PAGE
    assert warm.tokens == cold.tokens
    assert stored(pair) == before
    arena = Path(pair.config.arena_root) / NAME / f"{SEAT}.arena"
    expected = {(str(arena.stat().st_ino), str(arena))}
    mapped = [arena_in(ready(number).pid) for number in (0, 1)]
    assert mapped == [expected, expected]
