"""Jobs as their submitter sees them: `result`, `stream`, `cancel`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rayhicache.actors.calls import ActorGone, ask
from rayhicache.actors.messages import News
from rayhicache.core.jobs import ENDED, PartReport, PartState, PartUpdate
from rayhicache.errors import ClusterClosed, InvalidRequest, JobCancelled, JobFailed, JobTimeout
from rayhicache.wire.codec import decode

NEWS_SECONDS = 10.0
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """Prompts to answer, greedily.

    Attributes:
        prompts: strings, or sequences of token ids; at least one, all of one kind.
        max_new_tokens: tokens of each answer.

    Raises:
        InvalidRequest: no prompt, prompts of two kinds, or no token asked for.
    """

    prompts: list[str] | list[list[int]]
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        found = _wrong(self.prompts, self.max_new_tokens)
        if found:
            raise InvalidRequest(
                asked="make a GenerateJob",
                found=found,
                remedy="pass a list of strings or a list of lists of token ids, at least one, and "
                "max_new_tokens >= 1",
            )


def _wrong(prompts: object, max_new_tokens: object) -> str:
    """What is wrong with a job's arguments, which come from outside the type checker's reach."""
    if not isinstance(prompts, (list, tuple)) or not prompts:
        return f"prompts is {str(prompts)[:40]!r}, not a list with something in it"
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        return f"max_new_tokens is {max_new_tokens!r}"
    if all(isinstance(prompt, str) for prompt in prompts):
        return ""
    for number, prompt in enumerate(prompts):
        ids = isinstance(prompt, (list, tuple)) and all(isinstance(token, int) for token in prompt)
        if not ids:
            return f"prompt {number} of {len(prompts)} isn't like the first one, or no token ids"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One prompt's answer. `text` is None where the prompt was of token ids."""

    tokens: tuple[int, ...]
    text: str | None
    report: PartReport


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The answers, in the order of the prompts."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedToken:
    """A token of prompt `part`'s answer, its number `index` in it."""

    part: int
    index: int
    token: int


class Job:
    """A job under way. The cluster goes on with it whether or not anyone asks.

    Attributes:
        id: of the job.
    """

    def __init__(self, id: str, num_parts: int, controller: Any, call_seconds: float) -> None:
        self.id = id
        self._num_parts = num_parts
        self._controller = controller
        self._call_seconds = call_seconds

    def result(self, timeout: float | None = None) -> JobResult:
        """Wait for all answers.

        Raises:
            JobTimeout: not within `timeout` seconds; the job goes on.
            JobFailed: a part failed on every worker that it was tried on, or can't be served.
            JobCancelled: somebody cancelled it.
            ClusterClosed: the cluster is gone.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        cursors = [0] * self._num_parts
        parts: dict[int, list[int]] = {part: [] for part in range(self._num_parts)}
        while True:
            updates = self._news(cursors, deadline)
            for update in updates:
                parts[update.part].extend(update.tokens)
                cursors[update.part] += len(update.tokens)
            if all(update.state in ENDED for update in updates):
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise JobTimeout(
                    asked=f"wait for job {self.id}",
                    found=f"{sum(u.state is PartState.DONE for u in updates)} of "
                    f"{self._num_parts} prompts are answered after {timeout} s",
                    remedy="wait again, or cancel it",
                )
        self._raise_for(updates)
        texts: list[str] = self._ask("texts", self.id)
        return JobResult(
            outputs=tuple(
                Output(
                    tokens=tuple(parts[update.part]),
                    text=texts[update.part] if texts else None,
                    report=_report(update),
                )
                for update in updates
            )
        )

    def stream(self) -> Iterator[StreamedToken]:
        """Tokens as they are made, each once, also when a worker dies and its part runs anew.

        Raises:
            JobFailed, JobCancelled, ClusterClosed: as `result`, after the tokens that were made.
        """
        cursors = [0] * self._num_parts
        while True:
            updates = self._news(cursors, None)
            for update in updates:
                for token in update.tokens:
                    yield StreamedToken(part=update.part, index=cursors[update.part], token=token)
                    cursors[update.part] += 1
            if all(update.state in ENDED for update in updates):
                self._raise_for(updates)
                return

    def cancel(self) -> None:
        """End what has not ended; it stops at its next forward. Doesn't wait for that.

        Raises:
            ClusterClosed: the cluster is gone.
        """
        self._ask("cancel", self.id, group="control")

    def _news(self, cursors: list[int], deadline: float | None) -> tuple[PartUpdate, ...]:
        seconds = NEWS_SECONDS
        if deadline is not None:
            seconds = min(max(deadline - time.monotonic(), 0.0), seconds)
        # Without a deadline there is time to wait behind others that wait for news.
        longer = seconds if deadline is not None else seconds + PATIENCE_SECONDS
        found = self._ask("news", self.id, list(cursors), seconds, group="news", longer=longer)
        return decode(found, News).parts

    def _raise_for(self, updates: tuple[PartUpdate, ...]) -> None:
        for update in updates:
            if update.state is PartState.FAILED:
                raise JobFailed(
                    asked=f"answer prompt {update.part} of job {self.id}",
                    found=update.cause,
                    remedy="see the workers' logs; submit it again once they are well",
                )
        if any(update.state is PartState.CANCELLED for update in updates):
            raise JobCancelled(
                asked=f"answer the prompts of job {self.id}",
                found="it was cancelled",
                remedy="submit it again",
            )

    def _ask(self, method: str, *args: object, group: str = "", longer: float = 0.0) -> Any:
        what, limit = f"follow job {self.id}", self._call_seconds + longer
        try:
            return ask(self._controller, method, *args, what=what, timeout=limit, group=group)
        except ActorGone as fault:
            raise ClusterClosed(
                asked=fault.asked,
                found=f"the controller doesn't answer: {fault.found}",
                remedy="connect again; if that fails, launch the cluster anew",
            ) from fault


def _report(update: PartUpdate) -> PartReport:
    assert update.report is not None, "a part that is done has its report"
    return update.report
