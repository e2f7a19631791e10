"""A cluster of two nodes: pages travel, jobs are answered, streamed and cancelled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

import clusters
from clusters import ENGINE, LIMITS, NAME, PAGE, SEATS, at, eventually, known_at, prompt, run_on
from rayhicache.actors.cluster import Cluster, connect
from rayhicache.actors.job import GenerateJob, Job
from rayhicache.actors.naming import worker_name
from rayhicache.errors import (
    ClusterNotFound,
    InvalidRequest,
    JobCancelled,
    JobTimeout,
    PromptTooLong,
    QueueFull,
)

pytestmark = pytest.mark.ray
SECONDS = clusters.SECONDS


def test_a_prefix_of_one_node_is_restored_on_the_other_bit_by_bit(cluster: Cluster) -> None:
    cold = run_on("node0", prompt(1))
    assert cold.report.recomputed_tokens == cold.report.prompt_tokens
    # The directory learns of it within moments; a node that asks before that computes.
    assert eventually(lambda: known_at("node0", prompt(1)))
    remote = run_on("node1", prompt(1))
    assert remote.report.restored_remote_tokens == 6 * PAGE
    assert remote.report.restored_local_tokens == 0
    assert remote.tokens == cold.tokens
    here = run_on("node1", prompt(1))
    assert here.report.restored_local_tokens == 6 * PAGE, "what was pulled is this node's own now"
    assert here.tokens == cold.tokens


def test_a_job_is_answered_in_the_order_of_its_prompts(cluster: Cluster) -> None:
    prompts = [prompt(number, 3 * PAGE) for number in range(10, 14)]
    result = cluster.submit(GenerateJob(prompts=prompts, max_new_tokens=5)).result(SECONDS)
    assert [len(output.tokens) for output in result.outputs] == [5] * 4
    assert [output.report.prompt_tokens for output in result.outputs] == [3 * PAGE] * 4
    assert {output.text for output in result.outputs} == {None}
    for number, output in zip(range(10, 14), result.outputs, strict=True):
        assert run_on("node0", prompt(number, 3 * PAGE), 5).tokens == output.tokens
    assert {output.report.worker for output in result.outputs} == {
        worker_name(NAME, seat, 0) for seat in SEATS
    }, "the router spreads what nobody has"


def test_a_job_goes_to_the_node_that_has_its_prefix(cluster: Cluster) -> None:
    run_on("node1", prompt(20))
    assert eventually(lambda: known_at("node1", prompt(20)))
    for _ in range(3):
        job = cluster.submit(GenerateJob(prompts=[prompt(20)], max_new_tokens=2))
        (output,) = job.result(SECONDS).outputs
        assert output.report.worker == worker_name(NAME, "node1", 0)
        assert output.report.restored_local_tokens == 6 * PAGE


def test_a_stream_yields_each_token_once_and_in_order(cluster: Cluster) -> None:
    prompts = [prompt(number, 2 * PAGE) for number in (30, 31)]
    job = cluster.submit(GenerateJob(prompts=prompts, max_new_tokens=20))
    streamed = list(job.stream())
    assert Counter((one.part, one.index) for one in streamed) == Counter(
        (part, index) for part in range(2) for index in range(20)
    )
    result = job.result(SECONDS)
    for part, output in enumerate(result.outputs):
        told = [one.token for one in streamed if one.part == part]
        assert tuple(told) == output.tokens


def long_job(cluster: Cluster, count: int = 1) -> Job:
    """Seconds of work for each prompt."""
    prompts = [prompt(number, 2 * PAGE) for number in range(40, 40 + count)]
    return cluster.submit(GenerateJob(prompts=prompts, max_new_tokens=700))


def test_a_result_that_is_not_there_in_time_is_a_timeout_and_a_cancelled_job_ends(
    cluster: Cluster,
) -> None:
    job = long_job(cluster, 3)
    stream = job.stream()
    next(stream)
    with pytest.raises(JobTimeout, match="0 of 3 prompts"):
        job.result(timeout=0.2)
    job.cancel()
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result(SECONDS)
    with pytest.raises(JobCancelled):
        list(stream)
    assert eventually(lambda: cluster.status().running == 0)
    run_on("node0", prompt(49, PAGE))
    run_on("node1", prompt(49, PAGE))


def test_the_queue_is_bounded(cluster: Cluster) -> None:
    job = long_job(cluster, LIMITS.queue_max)
    with pytest.raises(QueueFull, match="0 of 8 places") as refusal:
        cluster.submit(GenerateJob(prompts=[prompt(50)]))
    assert "queue_max" in refusal.value.remedy
    job.cancel()
    assert cluster.submit(GenerateJob(prompts=[prompt(50)], max_new_tokens=2)).result(SECONDS)


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "kind", "found"),
    [
        ([[1] * 760], 10, PromptTooLong, "takes 768 tokens"),
        ([[]], 1, InvalidRequest, "it is empty"),
        ([[1, ENGINE.vocab_size]], 1, InvalidRequest, "outside the model's .0, 512"),
        ([[-1]], 1, InvalidRequest, "outside the model's .0, 512"),
    ],
)
def test_a_prompt_that_can_not_be_served_is_refused_and_nothing_is_queued(
    cluster: Cluster,
    prompts: list[list[int]],
    new_tokens: int,
    kind: type[InvalidRequest] | type[PromptTooLong],
    found: str,
) -> None:
    with pytest.raises(kind, match=found) as refusal:
        cluster.submit(GenerateJob(prompts=prompts, max_new_tokens=new_tokens))
    assert refusal.value.asked
    assert refusal.value.remedy
    assert (cluster.status().queued, cluster.status().running) == (0, 0)


def test_other_processes_connect_by_name_and_get_the_same_answers(cluster: Cluster) -> None:
    mine = cluster.submit(GenerateJob(prompts=[prompt(60)], max_new_tokens=6)).result(SECONDS)
    program = (
        "import json, sys\n"
        "import rayhicache as hc\n"
        "name, address, prompt = json.loads(sys.argv[1])\n"
        "cluster = hc.connect(name, address=address)\n"
        "job = cluster.submit(hc.GenerateJob(prompts=[prompt], max_new_tokens=6))\n"
        "print(json.dumps(job.result(timeout=60).outputs[0].tokens))\n"
    )
    words = json.dumps([NAME, cluster.address, prompt(60)])
    others = [
        subprocess.Popen([sys.executable, "-c", program, words], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [other.communicate(timeout=60)[0] for other in others]
    assert [tuple(json.loads(line)) for line in said] == [mine.outputs[0].tokens] * 2


def test_a_name_that_no_cluster_has_is_told_with_those_that_there_are(cluster: Cluster) -> None:
    with pytest.raises(ClusterNotFound) as refusal:
        connect("nobody", address=cluster.address)
    assert NAME in refusal.value.remedy
    again = connect(NAME, address=cluster.address)
    assert again.config == cluster.config
    assert again.status().name == NAME


def test_without_further_traffic_leases_end_and_stores_are_committed(cluster: Cluster) -> None:
    """R15: nobody calls the engine again."""
    before = at(cluster, "node0").stored
    clusters.finish(clusters.begin(clusters.worker("node0"), prompt(70)))
    clusters.finish(clusters.begin(clusters.worker("node0"), prompt(70)))
    assert eventually(lambda: at(cluster, "node0").stored == before + 6, within=1.0)
    status = at(cluster, "node0")
    assert eventually(lambda: at(cluster, "node0").leased == 0, within=1.0)
    assert (status.filling, status.sealed) == (0, 0)


def test_a_directory_that_was_killed_is_told_again_and_lookups_go_on(cluster: Cluster) -> None:
    cold = run_on("node0", prompt(80))
    clusters.kill(clusters.pid_of(clusters.directory()))
    # Perhaps it is back already, perhaps not: the answer is the same.
    assert run_on("node1", prompt(81, 3 * PAGE)).report.prompt_tokens == 3 * PAGE
    assert eventually(lambda: known_at("node0", prompt(80)))

    def remote() -> bool:
        # A pool leaves a directory that failed alone for two seconds at most.
        one = run_on("node1", prompt(80))
        assert one.tokens == cold.tokens
        return one.report.restored_remote_tokens + one.report.restored_local_tokens > 0

    assert eventually(remote)
