"""Jobs: their parts, who runs them, how often they were tried, and which tokens are known.

A part is one prompt of a job. It runs on one worker at a time; when that worker dies it is given
to another, which computes the same tokens again, and those that are known already are not told
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class PartState(Enum):
    """QUEUED, RUNNING, then one of the ends."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (PartState.DONE, PartState.FAILED, PartState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """How a part was served: where its prompt's tokens came from, and when its first token came.

    `restored_local_tokens + restored_remote_tokens + recomputed_tokens = prompt_tokens`.
    """

    prompt_tokens: int
    restored_local_tokens: int
    restored_remote_tokens: int
    recomputed_tokens: int
    ttft_seconds: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUpdate:
    """News of a part since the cursor that was asked for.

    Attributes:
        part: its number in the job.
        tokens: new tokens, in order.
        state: of the part.
        cause: why it failed, else empty.
        report: once it is DONE.
    """

    part: int
    tokens: tuple[int, ...]
    state: PartState
    cause: str
    report: PartReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A part for a worker to run; `attempt` tells the runs of one part apart."""

    job: str
    part: int
    attempt: int
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(slots=True)
class _Part:
    prompt: tuple[int, ...]
    max_new_tokens: int
    worker: str
    state: PartState = PartState.QUEUED
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    cause: str = ""
    report: PartReport | None = None


@dataclass(slots=True)
class JobBook:
    """All jobs of a cluster. Not thread-safe: its owner holds one lock around every call.

    Attributes:
        parts_max: parts that may be queued or running; more are refused.
        tries_max: runs of one part before its job fails.
        jobs_kept: ended jobs that are still remembered.
    """

    parts_max: int
    tries_max: int
    jobs_kept: int = 1024
    _jobs: dict[str, list[_Part]] = field(default_factory=dict)
    _queues: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def add_worker(self, worker: str) -> None:
        """A worker has registered: nothing is queued for one that hasn't."""
        self._queues.setdefault(worker, [])

    def workers(self) -> tuple[str, ...]:
        """The workers that have registered."""
        return tuple(self._queues)

    def room(self) -> int:
        """How many more parts may be added."""
        return self.parts_max - sum(
            part.state not in ENDED for parts in self._jobs.values() for part in parts
        )

    def add_job(self, job: str, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> None:
        """Add a job whose parts wait for `enqueue`. The caller has checked `room`.

        Ended jobs beyond `jobs_kept` are forgotten, oldest first.
        """
        assert job not in self._jobs
        assert len(prompts) <= self.room()
        self._forget_old()
        self._jobs[job] = [_Part(prompt, max_new_tokens, "") for prompt in prompts]

    def enqueue(self, job: str, part: int, worker: str) -> None:
        """Queue a part for a worker, unless it has ended meanwhile, or its job was forgotten."""
        assert worker in self._queues, "nothing is queued for a worker that has not registered"
        entry = self._jobs[job][part] if job in self._jobs else None
        if entry is not None and entry.state not in ENDED:
            entry.state, entry.worker = PartState.QUEUED, worker
            self._queues[worker].append((job, part))

    def take(self, worker: str) -> Assignment | None:
        """The next part for a worker to run, oldest first."""
        queue = self._queues[worker]
        while queue:
            job, number = queue.pop(0)
            part = self._queued(job, number)
            if part is not None:
                part.state = PartState.RUNNING
                part.attempt += 1
                return self._assignment(job, number, part)
        return None

    def tokens(self, run: Assignment, start: int, tokens: Sequence[int]) -> bool:
        """A run has made the tokens [start, ...). False if nobody wants them any more.

        Tokens that are known are passed over; greedy runs of one prompt make equal tokens. Those
        that overtook others are too: a run's result has them all.
        """
        part = self._part(run)
        if part is None or start > len(part.tokens):
            return False
        part.tokens.extend(tokens[len(part.tokens) - start :])
        return True

    def take_queue(self, worker: str) -> list[tuple[str, int, tuple[int, ...]]]:
        """Empty a worker's queue: (job, part, prompt) of what must be queued elsewhere."""
        queue, self._queues[worker] = self._queues[worker], []
        return [
            (job, number, part.prompt)
            for job, number in queue
            if (part := self._queued(job, number)) is not None
        ]

    def refuse(self, job: str, number: int, cause: str) -> None:
        """Nobody can run a part that is queued."""
        part = self._queued(job, number)
        if part is not None:
            part.state, part.cause = PartState.FAILED, cause

    def finish(self, run: Assignment, report: PartReport) -> None:
        """A run has made all its tokens."""
        part = self._part(run)
        if part is not None:
            part.state, part.report = PartState.DONE, report

    def fail(self, run: Assignment, cause: str, *, retry: bool) -> bool:
        """A run has failed; True if the part is to be queued again.

        Args:
            retry: the fault was the worker's, so another may do better.
        """
        part = self._part(run)
        if part is None:
            return False
        if retry and part.attempt < self.tries_max:
            part.state, part.worker = PartState.QUEUED, ""
            return True
        part.state = PartState.FAILED
        part.cause = f"{cause} (try {part.attempt} of {self.tries_max})" if retry else cause
        return False

    def cancel(self, job: str) -> None:
        """End a job's parts that have not ended."""
        for part in self._jobs[job]:
            if part.state not in ENDED:
                part.state = PartState.CANCELLED

    def running(self, job: str) -> list[tuple[str, Assignment]]:
        """The runs of a job that are under way, each with its worker."""
        return [
            (part.worker, self._assignment(job, number, part))
            for number, part in enumerate(self._jobs[job])
            if part.state is PartState.RUNNING
        ]

    def open_jobs(self) -> list[str]:
        """The jobs that have a part that has not ended."""
        return [
            job
            for job, parts in self._jobs.items()
            if any(part.state not in ENDED for part in parts)
        ]

    def num_parts(self, job: str) -> int:
        """How many parts a job has."""
        return len(self._jobs[job])

    def knows(self, job: str) -> bool:
        """Whether the job is remembered."""
        return job in self._jobs

    def update(self, job: str, cursors: Sequence[int]) -> tuple[PartUpdate, ...]:
        """What is new since these token counts, one per part."""
        return tuple(
            PartUpdate(
                part=number,
                tokens=tuple(part.tokens[cursor:]),
                state=part.state,
                cause=part.cause,
                report=part.report,
            )
            for number, (part, cursor) in enumerate(zip(self._jobs[job], cursors, strict=True))
        )

    def has_news(self, job: str, cursors: Sequence[int]) -> bool:
        """Whether a part has more tokens than the cursors say, or all have ended."""
        parts = self._jobs[job]
        return all(part.state in ENDED for part in parts) or any(
            len(part.tokens) > cursor for part, cursor in zip(parts, cursors, strict=True)
        )

    def queued_tokens(self, worker: str) -> int:
        """Prompt tokens queued for or running on a worker."""
        return sum(
            len(part.prompt)
            for parts in self._jobs.values()
            for part in parts
            if part.worker == worker and part.state not in ENDED
        )

    def counts(self) -> dict[PartState, int]:
        """Parts by state, of the jobs that are remembered."""
        states = [part.state for parts in self._jobs.values() for part in parts]
        return {state: states.count(state) for state in PartState}

    def _assignment(self, job: str, number: int, part: _Part) -> Assignment:
        return Assignment(
            job=job,
            part=number,
            attempt=part.attempt,
            prompt=part.prompt,
            max_new_tokens=part.max_new_tokens,
        )

    def _part(self, run: Assignment) -> _Part | None:
        """The part of a run, if that is still its current one."""
        parts = self._jobs.get(run.job)
        part = None if parts is None else parts[run.part]
        if part is None or part.attempt != run.attempt or part.state is not PartState.RUNNING:
            return None
        return part

    def _queued(self, job: str, number: int) -> _Part | None:
        """The part, if it is queued: it may have ended, and its job been forgotten."""
        parts = self._jobs.get(job)
        part = None if parts is None else parts[number]
        return part if part is not None and part.state is PartState.QUEUED else None

    def _forget_old(self) -> None:
        ended = [job for job, parts in self._jobs.items() if all(p.state in ENDED for p in parts)]
        for job in ended[: max(len(ended) - self.jobs_kept, 0)]:
            del self._jobs[job]
