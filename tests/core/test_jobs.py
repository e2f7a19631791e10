"""Jobs: who runs which part, how often, and which tokens are told."""

from __future__ import annotations

import pytest

from rayhicache.core.jobs import Assignment, JobBook, PartReport, PartState, PartUpdate

REPORT = PartReport(
    prompt_tokens=3,
    restored_local_tokens=0,
    restored_remote_tokens=0,
    recomputed_tokens=3,
    ttft_seconds=0.1,
    worker="w1",
)


def book(*workers: str, parts_max: int = 8, tries_max: int = 3, jobs_kept: int = 8) -> JobBook:
    made = JobBook(parts_max=parts_max, tries_max=tries_max, jobs_kept=jobs_kept)
    for worker in workers:
        made.add_worker(worker)
    return made


def queued(made: JobBook, job: str, *workers: str) -> None:
    """A job with one part for each worker named."""
    made.add_job(job, [(1, 2, 3)] * len(workers), max_new_tokens=4)
    for part, worker in enumerate(workers):
        made.enqueue(job, part, worker)


def taken(made: JobBook, worker: str) -> Assignment:
    run = made.take(worker)
    assert run is not None
    return run


def state(made: JobBook, job: str, part: int = 0) -> PartUpdate:
    cursors = [0] * made.num_parts(job)
    return made.update(job, cursors)[part]


# ── queues ──────────────────────────────────────────────────────────────────────────────────


def test_a_worker_runs_its_parts_oldest_first() -> None:
    made = book("w1")
    queued(made, "j1", "w1", "w1")
    queued(made, "j2", "w1")
    order = [taken(made, "w1") for _ in range(3)]
    assert [(run.job, run.part) for run in order] == [("j1", 0), ("j1", 1), ("j2", 0)]
    assert made.take("w1") is None


def test_nothing_is_queued_for_a_worker_that_has_not_registered() -> None:
    """R37."""
    made = book("w1")
    made.add_job("j", [(1,)], 1)
    assert made.workers() == ("w1",)
    with pytest.raises(AssertionError, match="not registered"):
        made.enqueue("j", 0, "w2")
    made.add_worker("w2")
    made.enqueue("j", 0, "w2")
    assert taken(made, "w2").job == "j"


def test_registering_again_keeps_what_is_queued() -> None:
    made = book("w1")
    queued(made, "j", "w1")
    made.add_worker("w1")
    assert made.take("w1") is not None


def test_room_counts_what_is_queued_and_running_and_not_what_has_ended() -> None:
    made = book("w1", parts_max=3)
    queued(made, "j", "w1", "w1")
    assert made.room() == 1
    run = taken(made, "w1")
    assert made.room() == 1
    made.finish(run, REPORT)
    assert made.room() == 2
    made.cancel("j")
    assert made.room() == 3
    with pytest.raises(AssertionError):
        made.add_job("too many", [(1,)] * 4, 1)


def test_queued_tokens_are_those_of_parts_that_wait_or_run() -> None:
    made = book("w1", "w2")
    queued(made, "j", "w1", "w1", "w2")
    assert (made.queued_tokens("w1"), made.queued_tokens("w2")) == (6, 3)
    made.finish(taken(made, "w1"), REPORT)
    assert made.queued_tokens("w1") == 3
    assert made.counts()[PartState.QUEUED] == 2


# ── tokens over several runs ────────────────────────────────────────────────────────────────


def test_tokens_of_a_second_run_that_are_known_are_not_told_again() -> None:
    made = book("w1", "w2")
    queued(made, "j", "w1")
    first = taken(made, "w1")
    made.tokens(first, 0, [10, 11])
    assert made.fail(first, "died", retry=True)
    made.enqueue("j", 0, "w2")
    second = taken(made, "w2")
    assert second.attempt == 2
    made.tokens(second, 0, [10])
    made.tokens(second, 1, [11, 12])
    assert made.update("j", [2])[0].tokens == (12,)
    made.tokens(second, 0, [10, 11, 12, 13])
    made.finish(second, REPORT)
    assert state(made, "j").tokens == (10, 11, 12, 13)


def test_tokens_that_overtook_others_are_passed_over_until_the_result_comes() -> None:
    made = book("w1")
    queued(made, "j", "w1")
    run = taken(made, "w1")
    assert not made.tokens(run, 2, [12])
    assert state(made, "j").tokens == ()
    assert made.tokens(run, 0, [10, 11, 12])
    assert state(made, "j").tokens == (10, 11, 12)


def test_a_run_that_was_given_up_tells_nothing_any_more() -> None:
    made = book("w1", "w2")
    queued(made, "j", "w1")
    old = taken(made, "w1")
    made.fail(old, "cut off", retry=True)
    made.enqueue("j", 0, "w2")
    new = taken(made, "w2")
    assert not made.tokens(old, 0, [99])
    made.finish(old, REPORT)
    assert not made.fail(old, "late", retry=False)
    assert state(made, "j").state is PartState.RUNNING
    assert made.tokens(new, 0, [10])


def test_news_are_more_tokens_or_the_end_of_all_parts() -> None:
    made = book("w1")
    queued(made, "j", "w1", "w1")
    assert not made.has_news("j", [0, 0])
    run = taken(made, "w1")
    made.tokens(run, 0, [10])
    assert made.has_news("j", [0, 0])
    assert not made.has_news("j", [1, 0])
    made.finish(run, REPORT)
    assert not made.has_news("j", [1, 0])
    made.finish(taken(made, "w1"), REPORT)
    assert made.has_news("j", [1, 0])


# ── faults ──────────────────────────────────────────────────────────────────────────────────


def test_a_part_is_tried_so_often_and_no_more() -> None:
    made = book("w1", tries_max=2)
    queued(made, "j", "w1")
    assert made.fail(taken(made, "w1"), "died", retry=True)
    made.enqueue("j", 0, "w1")
    assert not made.fail(taken(made, "w1"), "died again", retry=True)
    assert state(made, "j").state is PartState.FAILED
    assert state(made, "j").cause == "died again (try 2 of 2)"
    made.enqueue("j", 0, "w1")
    assert made.take("w1") is None, "what has ended isn't queued again"


def test_a_fault_of_the_request_is_not_tried_again() -> None:
    made = book("w1")
    queued(made, "j", "w1")
    assert not made.fail(taken(made, "w1"), "too long", retry=False)
    assert state(made, "j").cause == "too long"


def test_the_queue_of_a_worker_that_died_goes_elsewhere_as_it_was() -> None:
    made = book("w1", "w2")
    queued(made, "j1", "w1", "w1")
    queued(made, "j2", "w1")
    running = taken(made, "w1")
    made.cancel("j2")
    assert made.take_queue("w1") == [("j1", 1, (1, 2, 3))]
    assert made.take("w1") is None
    made.enqueue("j1", 1, "w2")
    assert taken(made, "w2").attempt == 1, "it had not been tried"
    assert made.fail(running, "died", retry=True)


def test_a_part_that_nobody_can_run_fails_with_its_cause() -> None:
    made = book("w1")
    queued(made, "j", "w1", "w1")
    run = taken(made, "w1")
    for job, part, _ in made.take_queue("w1"):
        made.refuse(job, part, "no worker came back")
    made.refuse(run.job, run.part, "it runs, so it isn't refused")
    assert state(made, "j", 0).state is PartState.RUNNING
    assert (state(made, "j", 1).state, state(made, "j", 1).cause) == (
        PartState.FAILED,
        "no worker came back",
    )


# ── ends ────────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_job_runs_no_more_and_keeps_what_is_done() -> None:
    made = book("w1")
    queued(made, "j", "w1", "w1", "w1")
    made.finish(taken(made, "w1"), REPORT)
    running = taken(made, "w1")
    assert made.running("j") == [("w1", running)]
    made.cancel("j")
    assert [state(made, "j", part).state for part in range(3)] == [
        PartState.DONE,
        PartState.CANCELLED,
        PartState.CANCELLED,
    ]
    assert made.take("w1") is None
    assert not made.tokens(running, 0, [10])
    made.finish(running, REPORT)
    assert state(made, "j", 1).state is PartState.CANCELLED
    assert made.open_jobs() == []


def test_open_jobs_are_those_with_a_part_that_has_not_ended() -> None:
    made = book("w1")
    queued(made, "j1", "w1")
    queued(made, "j2", "w1")
    made.finish(taken(made, "w1"), REPORT)
    assert made.open_jobs() == ["j2"]


def test_old_jobs_are_forgotten_and_their_late_news_are_no_crash() -> None:
    made = book("w1", "w2", jobs_kept=1)
    queued(made, "j1", "w1", "w2")
    run = taken(made, "w1")
    made.cancel("j1")
    for name in ("j2", "j3"):
        queued(made, name, "w1")
        made.cancel(name)
    queued(made, "j4", "w1")
    assert [made.knows(name) for name in ("j1", "j2", "j3", "j4")] == [False, False, True, True]
    assert not made.tokens(run, 0, [1])
    made.finish(run, REPORT)
    assert not made.fail(run, "late", retry=True)
    made.enqueue("j1", 0, "w1")
    assert made.take("w2") is None, "its queue still named the forgotten job"
    assert made.take_queue("w2") == []
    assert taken(made, "w1").job == "j4"


def test_a_job_under_way_is_never_forgotten() -> None:
    made = book("w1", jobs_kept=0)
    queued(made, "j1", "w1")
    queued(made, "j2", "w1")
    assert made.knows("j1")
