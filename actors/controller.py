"""`Controller`: the actor that routes prompts to workers and remembers jobs.

    submit ─► router (directory's hints, queues) ─► a worker's queue ─► its dispatcher thread ─► run
                    ▲                                                        │ worker died
                    └────────────────────────────────────────────────────────┘

Decisions are `core.jobs.JobBook` and `core.routing.route`; this class holds their lock, the
threads and the handles. The class is plain; `rayhicache.actors.remote` makes the actor of it.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence

import ray

from rayhicache.actors.calls import ActorGone, ask, start
from rayhicache.actors.directory import DirectoryClient
from rayhicache.actors.messages import News, PartResult, Submission
from rayhicache.actors.roster import Roster
from rayhicache.actors.status import ClusterStatus, WorkerStatus
from rayhicache.config import ClusterConfig
from rayhicache.core.jobs import Assignment, JobBook, PartState
from rayhicache.core.keys import PageKey, page_keys
from rayhicache.core.routing import Costs, WorkerView, route
from rayhicache.engines.tokenizer import decode as detokenize
from rayhicache.engines.tokenizer import encode as tokenize
from rayhicache.errors import (
    ClusterClosed,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    PromptTooLong,
    QueueFull,
    RayHiCacheError,
)
from rayhicache.logs import name_process
from rayhicache.wire.codec import decode, encode

log = logging.getLogger(__name__)

RETURN_SECONDS = 0.25
NEWS_SECONDS_MAX = 30.0


class Controller:
    """One cluster's jobs and actors."""

    def __init__(self, config: bytes) -> None:
        self._config = decode(config, ClusterConfig)
        self._roster = Roster(config=self._config)
        self._book = JobBook(
            parts_max=self._config.limits.queue_max, tries_max=self._config.limits.tries_max
        )
        self._directory = DirectoryClient(self._config.name, self._config.limits.call_seconds)
        self._changed = threading.Condition()
        self._away: set[str] = set()
        self._texts: dict[str, bool] = {}
        self._seed: PageKey | None = None
        self._closed = False
        self._started = False
        name_process(tier=self._config.name, node="controller", epoch=0)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # A later life finds the actors by name; the jobs of the earlier one are lost.
            threading.Thread(target=self._restart, name="restart", daemon=True).start()

    def start(self) -> None:
        """Bring the cluster up; when this fails, everything that had come up is gone again.

        Raises:
            RayHiCacheError: what an actor says, or `LaunchFailed`.
        """
        try:
            self._bring_up()
        except RayHiCacheError:
            self._roster.stop()
            raise

    def ready(self) -> bool:
        """Whether the cluster is up."""
        return self._started

    # ── jobs ────────────────────────────────────────────────────────────────────────────────

    def submit(self, submission: bytes) -> str:
        """Queue a job; its id.

        Raises:
            InvalidRequest, PromptTooLong: the job can't be served; nothing was queued.
            QueueFull: too many prompts are waiting.
            ClusterClosed: after `shutdown`.
        """
        job = decode(submission, Submission)
        prompts = job.tokens or tuple(tuple(tokenize(text)) for text in job.texts)
        self._check(prompts, job.max_new_tokens)
        name = uuid.uuid4().hex[:16]
        with self._changed:
            self._check_open()
            if len(prompts) > self._book.room():
                raise QueueFull(
                    asked=f"submit {len(prompts)} prompts",
                    found=f"{self._book.room()} of {self._book.parts_max} places are free",
                    remedy="wait for earlier jobs, submit fewer at once, or raise queue_max",
                )
            self._book.add_job(name, prompts, job.max_new_tokens)
            self._texts = {known: t for known, t in self._texts.items() if self._book.knows(known)}
            self._texts[name] = bool(job.texts)
        for part, prompt in enumerate(prompts):
            self._enqueue(name, part, prompt)
        return name

    def news(self, job: str, cursors: Sequence[int], timeout: float) -> bytes:
        """`News` of a job since these token counts; waits for some, at most `timeout` seconds.

        Raises:
            JobFailed: the controller doesn't know the job, or forgot it.
        """
        with self._changed:
            self._check_job(job)
            self._changed.wait_for(
                lambda: self._closed or self._book.has_news(job, cursors),
                min(timeout, NEWS_SECONDS_MAX),
            )
            return encode(News(parts=self._book.update(job, cursors)))

    def texts(self, job: str) -> list[str]:
        """The answers of a job of strings so far, as text; nothing for a job of token ids."""
        with self._changed:
            self._check_job(job)
            if not self._texts.get(job):
                return []
            parts = self._book.update(job, [0] * self._book.num_parts(job))
        return [detokenize(part.tokens) for part in parts]

    def cancel(self, job: str) -> None:
        """End a job's parts that have not ended."""
        with self._changed:
            self._check_job(job)
            running = self._book.running(job)
            self._book.cancel(job)
            self._changed.notify_all()
        for worker, run in running:
            self._stop_run(worker, run)

    def tokens(self, assignment: bytes, start: int, tokens: Sequence[int]) -> None:
        """A worker tells of tokens that a run has made."""
        run = decode(assignment, Assignment)
        with self._changed:
            if self._book.tokens(run, start, tokens):
                self._changed.notify_all()

    # ── the cluster ─────────────────────────────────────────────────────────────────────────

    def config(self) -> bytes:
        """The `ClusterConfig` that the cluster was launched with."""
        return encode(self._config)

    def status(self) -> bytes:
        """A `ClusterStatus`."""
        pools, unreachable = self._roster.pool_statuses()
        with self._changed:
            counts = self._book.counts()
            workers = tuple(
                WorkerStatus(
                    name=name,
                    seat=ready.seat,
                    device=ready.device,
                    available=name not in self._away,
                    queued_tokens=self._book.queued_tokens(name),
                )
                for name, ready in self._roster.registered.items()
            )
        return encode(
            ClusterStatus(
                name=self._config.name,
                pools=pools,
                unreachable=unreachable,
                workers=workers,
                queued=counts[PartState.QUEUED],
                running=counts[PartState.RUNNING],
            )
        )

    def settle(self, timeout: float) -> bool:
        """Wait until every worker's stores so far are committed; False on time-out."""
        return self._roster.settle(timeout)

    def shutdown(self) -> None:
        """Cancel all jobs, end every actor but this one, remove the arenas. Idempotent."""
        with self._changed:
            self._closed = True
            jobs = self._book.open_jobs()
            self._changed.notify_all()
        for job in jobs:
            self.cancel(job)
        self._roster.stop()

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _bring_up(self) -> None:
        self._roster.start()
        with self._changed:
            for name, ready in self._roster.registered.items():
                self._book.add_worker(name)
                self._seed = ready.seed
            self._started = True
        for name in self._roster.workers:
            threading.Thread(
                target=self._dispatch, args=(name,), name=f"dispatch-{name}", daemon=True
            ).start()

    def _restart(self) -> None:
        """A later life: whatever isn't well yet is waited for, and nothing is torn down."""
        while True:
            try:
                self._bring_up()
            except RayHiCacheError as fault:
                log.warning("the controller's new life waits: %s", fault)
            else:
                return
            if self._closes_within(RETURN_SECONDS):
                return

    def _closes_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)

    def _check(self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> None:
        self._check_open()
        workers = self._roster.registered.values()
        if not workers:
            raise InvalidRequest(
                asked=f"serve a job on cluster {self._config.name!r}",
                found="it has no worker that is up",
                remedy="launch it with workers, or look up and load from an engine of your own",
            )
        longest = min(worker.longest for worker in workers)
        vocabulary = self._config.engine.vocab_size
        for number, prompt in enumerate(prompts):
            strange = [token for token in prompt if not 0 <= token < vocabulary]
            if not prompt or strange:
                raise InvalidRequest(
                    asked=f"serve prompt {number} of a job",
                    found=f"token ids {strange[:4]} outside the model's [0, {vocabulary:,})"
                    if strange
                    else "it is empty",
                    remedy="pass at least one token, all of the model's vocabulary",
                )
            if len(prompt) + max_new_tokens > longest:
                raise PromptTooLong(
                    asked=f"serve prompt {number} of a job: {len(prompt)} tokens and "
                    f"{max_new_tokens} new ones",
                    found=f"the engine takes {longest} tokens",
                    remedy="shorten the prompt, or give the engine more blocks or positions",
                )

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise ClusterClosed(
                asked=f"use cluster {self._config.name!r}",
                found="it was shut down" if self._closed else "its controller is starting",
                remedy="launch it anew" if self._closed else "try again in a moment",
            )

    def _check_job(self, job: str) -> None:
        if not self._book.knows(job):
            raise JobFailed(
                asked=f"follow job {job}",
                found="the controller doesn't know it: it is of another life, or long ended",
                remedy="submit it again",
            )

    def _enqueue(self, job: str, part: int, prompt: tuple[int, ...]) -> None:
        """Route one part to the worker that has it ready first."""
        assert self._seed is not None, "jobs are taken only once the cluster has started"
        keys = page_keys(self._seed, prompt, self._config.page_tokens)
        counts = self._directory.counts(keys)
        page = self._config.page_tokens
        with self._changed:
            names = [n for n in self._book.workers() if n not in self._away]
            views = []
            for name in names or self._book.workers():
                seat = self._roster.registered[name].seat
                local = counts.get(seat, 0)
                best = max(counts.values(), default=0)
                views.append(
                    WorkerView(
                        id=name,
                        queued_tokens=self._book.queued_tokens(name),
                        local_tokens=min(local * page, len(prompt) - 1),
                        remote_tokens=max(min(best * page, len(prompt) - 1) - local * page, 0),
                    )
                )
            worker = route(len(prompt), views, Costs())
            assert worker is not None
            self._book.enqueue(job, part, worker)
            self._changed.notify_all()

    def _dispatch(self, worker: str) -> None:
        """One worker's thread: run what is queued for it, one part after the other."""
        while True:
            with self._changed:
                run: Assignment | None = None
                while run is None:
                    if self._closed:
                        return
                    run = self._book.take(worker)
                    if run is None:
                        self._changed.wait()
            self._run(worker, run)

    def _run(self, worker: str, run: Assignment) -> None:
        handle = self._roster.workers[worker]
        what = f"run part {run.part} of job {run.job} on {worker!r}"
        limit = self._config.limits.part_seconds
        try:
            found = ask(handle, "run", encode(run), what=what, timeout=limit)
            result = decode(found, PartResult)  # garbled, it ends this run and not the thread
        except ActorGone as fault:
            log.warning("%s", fault)
            self._stop_run(worker, run)  # it may be alive and only be slow
            self._failed(run, str(fault), retry=True, away=worker)
            self._wait_for_return(worker)
        except (InvalidRequest, PromptTooLong, JobCancelled) as fault:
            self._failed(run, str(fault), retry=False)
        except RayHiCacheError as fault:
            log.warning("%s failed: %s", what, fault)
            self._failed(run, str(fault), retry=True)
        else:
            with self._changed:
                self._book.tokens(run, 0, result.tokens)
                self._book.finish(run, result.report)
                self._changed.notify_all()

    def _stop_run(self, worker: str, run: Assignment) -> None:
        """Have a worker end a run, if it is at it. Doesn't wait."""
        mine = (run.job, run.part, run.attempt)
        what = f"cancel a run on {worker!r}"
        start(self._roster.workers[worker], "cancel", *mine, what=what, group="control")

    def _failed(self, run: Assignment, cause: str, *, retry: bool, away: str = "") -> None:
        with self._changed:
            again = (
                [(run.job, run.part, run.prompt)]
                if self._book.fail(run, cause, retry=retry)
                else []
            )
            if away:
                self._away.add(away)
                again += self._book.take_queue(away)
            self._changed.notify_all()
        for job, part, prompt in again:
            self._enqueue(job, part, prompt)

    def _wait_for_return(self, worker: str) -> None:
        """Ray restarts a worker; it gets no work before it has registered again.

        What was queued for it goes to others. While there are none it waits, for `ready_seconds`.
        """
        limits = self._config.limits
        deadline = time.monotonic() + limits.ready_seconds
        while not self._closes_within(RETURN_SECONDS):
            try:
                self._roster.register(worker, limits.call_seconds)
            except RayHiCacheError as fault:
                log.warning("waiting for %s: %s", worker, fault)
                self._rescue(worker, str(fault), give_up=time.monotonic() >= deadline)
            else:
                with self._changed:
                    self._away.discard(worker)
                return

    def _rescue(self, worker: str, cause: str, *, give_up: bool) -> None:
        """Give what is queued for a worker that is away to the others, if there are any."""
        with self._changed:
            others = set(self._book.workers()) - self._away
            queue = self._book.take_queue(worker) if others or give_up else []
            if not others:
                for job, part, _ in queue:
                    self._book.refuse(job, part, f"no worker came back: {cause}")
                self._changed.notify_all()
        if others:
            for job, part, prompt in queue:
                self._enqueue(job, part, prompt)
