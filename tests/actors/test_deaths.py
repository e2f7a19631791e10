"""Whatever dies, the answer is right, nothing stays held, and what is left goes on."""

from __future__ import annotations

import os

import pytest

import clusters
from clusters import (
    NAME,
    PAGE,
    ROOT,
    SEATS,
    at,
    eventually,
    known_at,
    pid_of,
    pool,
    prompt,
    run_on,
    worker,
    worker_pid,
)
from held_worker import StoreHeldWorker, held_worker
from rayhicache.actors.calls import ActorGone, answer
from rayhicache.actors.cluster import Cluster
from rayhicache.actors.job import GenerateJob
from rayhicache.actors.naming import worker_name
from rayhicache.errors import ClusterClosed, JobFailed

pytestmark = pytest.mark.ray
SECONDS = clusters.SECONDS
LONG = 300


def arenas() -> dict[str, int]:
    """Whatever files the tier has in shared memory, with their sizes."""
    return {str(path): path.stat().st_size for path in sorted(ROOT.rglob("*")) if path.is_file()}


# ── a worker ────────────────────────────────────────────────────────────────────────────────


def test_a_worker_killed_in_the_middle_of_a_load_leaves_no_lease(cluster: Cluster) -> None:
    run_on("node0", prompt(100))
    with held_worker(cluster, "node0") as held:
        run = held.run(prompt(100))
        assert eventually(lambda: at(cluster, "node0").leased == 6)
        clusters.kill(held.pid)
        assert eventually(lambda: at(cluster, "node0").leased == 0, within=3.0)
        with pytest.raises(ActorGone):
            answer(run, "run", SECONDS)
    assert at(cluster, "node0").sealed == 0


def test_a_worker_killed_in_the_middle_of_a_store_leaves_no_slot(cluster: Cluster) -> None:
    with held_worker(cluster, "node0", StoreHeldWorker) as held:
        clusters.finish(held.run(prompt(101)))
        assert eventually(lambda: at(cluster, "node0").filling == 6)
        used = at(cluster, "node0").used
        clusters.kill(held.pid)
        assert eventually(lambda: at(cluster, "node0").filling == 0, within=3.0)
        status = at(cluster, "node0")
        assert (status.sealed, status.used) == (0, used)


def test_a_stopped_worker_keeps_its_leases_and_is_shown(cluster: Cluster) -> None:
    run_on("node0", prompt(102))
    with held_worker(cluster, "node0") as held:
        run = held.run(prompt(102))
        assert eventually(lambda: at(cluster, "node0").leased == 6)
        with clusters.stopped(held.pid):
            assert eventually(lambda: sum(s.stopped for s in at(cluster, "node0").sessions) == 1)
            assert at(cluster, "node0").leased == 6
        held.release()
        clusters.finish(run)


def test_a_part_whose_worker_dies_runs_elsewhere_and_no_token_is_told_twice(
    cluster: Cluster,
) -> None:
    job = cluster.submit(GenerateJob(prompts=[prompt(110, 3 * PAGE)], max_new_tokens=LONG))
    stream = job.stream()
    told = [next(stream)]
    (busy,) = [w for w in cluster.status().workers if w.queued_tokens]
    clusters.kill(worker_pid_now(cluster, busy.seat))
    told += list(stream)
    assert [one.index for one in told] == list(range(LONG))
    (output,) = job.result(SECONDS).outputs
    assert tuple(one.token for one in told) == output.tokens
    assert output.report.worker != busy.name
    other = next(seat for seat in SEATS if seat != busy.seat)
    assert run_on(other, prompt(110, 3 * PAGE), LONG).tokens == output.tokens


def worker_pid_now(cluster: Cluster, seat: str) -> int:
    """Of the router's worker there, without waiting for its run to end."""
    name = worker_name(NAME, seat, 0)
    (session,) = [one for one in at(cluster, seat).sessions if one.client == name]
    return session.pid


def test_a_part_that_kills_every_worker_it_is_tried_on_fails_with_its_cause(
    cluster: Cluster,
) -> None:
    job = cluster.submit(GenerateJob(prompts=[prompt(111, 3 * PAGE)], max_new_tokens=LONG))
    next(job.stream())
    (busy,) = [w for w in cluster.status().workers if w.queued_tokens]
    clusters.kill(worker_pid_now(cluster, busy.seat))
    other = next(seat for seat in SEATS if seat != busy.seat)
    assert eventually(
        lambda: any(w.queued_tokens and w.seat == other for w in cluster.status().workers)
    )
    clusters.kill(worker_pid_now(cluster, other))
    with pytest.raises(JobFailed, match="try 2 of 2") as failure:
        job.result(SECONDS)
    assert failure.value.remedy
    # What comes while no worker is there waits for one, and is answered.
    waiting = cluster.submit(GenerateJob(prompts=[prompt(112, PAGE)], max_new_tokens=2))
    assert len(waiting.result(SECONDS).outputs[0].tokens) == 2


# ── a pool ──────────────────────────────────────────────────────────────────────────────────


def test_a_pool_killed_in_the_middle_of_a_load_comes_back_with_its_contents(
    cluster: Cluster,
) -> None:
    cold = run_on("node0", prompt(120))
    epoch, used = at(cluster, "node0").epoch, at(cluster, "node0").used
    with held_worker(cluster, "node0") as held:
        run = held.run(prompt(120))
        assert eventually(lambda: at(cluster, "node0").leased == 6)
        clusters.kill(pid_of(pool("node0")))
        held.release()
        result = clusters.finish(run)
        assert result.tokens == cold.tokens
        assert result.report.restored_local_tokens == 6 * PAGE, "the bytes are mapped"
        assert eventually(lambda: len(at(cluster, "node0").sessions) == 2), "both came back"
        assert eventually(lambda: at(cluster, "node0").leased == 0)
    assert at(cluster, "node0").epoch == epoch + 1
    assert at(cluster, "node0").used == used
    again = run_on("node0", prompt(120))
    assert again.report.restored_local_tokens == 6 * PAGE
    assert again.tokens == cold.tokens


def test_a_load_that_outlives_its_pool_keeps_its_slots_in_the_next_life(cluster: Cluster) -> None:
    """R29: while the copy is held, the new life leases what the worker said it reads."""
    cold = run_on("node0", prompt(121))
    with held_worker(cluster, "node0") as held:
        run = held.run(prompt(121))
        assert eventually(lambda: at(cluster, "node0").leased == 6)
        epoch = at(cluster, "node0").epoch
        clusters.kill(pid_of(pool("node0")))
        assert eventually(
            lambda: at(cluster, "node0").epoch == epoch + 1 and at(cluster, "node0").leased == 6
        )
        slots = at(cluster, "node0").slots
        for number in range(500, 500 + slots // 12 + 1):  # more pages than there are slots
            run_on("node0", prompt(number, 12 * PAGE))
        held.release()
        assert clusters.finish(run).tokens == cold.tokens
        assert eventually(lambda: at(cluster, "node0").leased == 0)


def test_a_store_that_outlives_its_pool_gets_no_slot_of_anybody_else(cluster: Cluster) -> None:
    """R29, the other way: what it still writes is sealed until it has passed."""
    with held_worker(cluster, "node1", StoreHeldWorker) as held:
        clusters.finish(held.run(prompt(122)))
        assert eventually(lambda: at(cluster, "node1").filling == 6)
        epoch = at(cluster, "node1").epoch
        clusters.kill(pid_of(pool("node1")))
        assert eventually(
            lambda: (
                at(cluster, "node1").epoch == epoch + 1 and len(at(cluster, "node1").sessions) == 2
            )
        )
        assert at(cluster, "node1").sealed == 6
        held.release()
        assert eventually(lambda: at(cluster, "node1").sealed == 0)
    assert run_on("node1", prompt(122)).report.restored_local_tokens == 0, "it was not committed"


def test_a_pull_from_a_mute_owner_and_from_a_dead_one_is_recomputed(cluster: Cluster) -> None:
    cold = run_on("node0", prompt(130))
    assert eventually(lambda: known_at("node0", prompt(130)))
    owner = pid_of(pool("node0"))
    with clusters.stopped(owner):
        mute = run_on("node1", prompt(130))
        assert mute.report.restored_remote_tokens == 0
        assert mute.tokens == cold.tokens
        run = clusters.begin(worker("node1"), prompt(130, 12 * PAGE))
        clusters.kill(owner)
    assert clusters.finish(run).report.restored_remote_tokens == 0
    assert run_on("node0", prompt(130)).tokens == cold.tokens


def test_five_kills_in_a_row_leave_no_more_than_one_arena_a_seat(cluster: Cluster) -> None:
    cold = run_on("node1", prompt(140))
    before = arenas()
    assert len(before) == len(SEATS)
    epoch = at(cluster, "node1").epoch
    for _ in range(5):
        clusters.kill(pid_of(pool("node1")))
    assert eventually(lambda: at(cluster, "node1").epoch == epoch + 5)
    assert arenas() == before
    assert eventually(lambda: len(at(cluster, "node1").sessions) == 1)
    again = run_on("node1", prompt(140))
    assert again.report.restored_local_tokens == 6 * PAGE
    assert again.tokens == cold.tokens


# ── the controller ──────────────────────────────────────────────────────────────────────────


def test_a_controllers_later_life_finds_everything_and_knows_no_earlier_job(
    cluster: Cluster,
) -> None:
    pids = {seat: worker_pid(seat) for seat in SEATS}
    job = cluster.submit(GenerateJob(prompts=[prompt(150, 2 * PAGE)], max_new_tokens=LONG))
    next(job.stream())
    clusters.kill(pid_of(clusters.controller()))

    def is_back() -> bool:
        try:
            return len(cluster.status().workers) == len(SEATS)
        except ClusterClosed:
            return False

    assert eventually(is_back)
    with pytest.raises(JobFailed, match="another life"):
        job.result(SECONDS)
    assert {seat: worker_pid(seat) for seat in SEATS} == pids, "nothing was started anew"
    again = cluster.submit(GenerateJob(prompts=[prompt(151, PAGE)], max_new_tokens=2))
    assert len(again.result(SECONDS).outputs[0].tokens) == 2
    assert os.path.isdir(ROOT)
