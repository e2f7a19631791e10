"""What an engine is asked, what it answers, and a request under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rayhicache.device.ticket import Ticket, TicketState
from rayhicache.errors import JobCancelled, RayHiCacheError
from rayhicache.requests import Prompt

OnLogits = Callable[[int, torch.Tensor], None]


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to answer.

    Attributes:
        id: for messages.
        tokens: the prompt, at least one.
        max_new_tokens: of the answer, at least one.
        on_token: told each token as it is chosen, on the engine's thread.
        on_logits: told of each forward, on the engine's thread, its first position and all its
            logits, `dtype[tokens, vocab_size], device`; again for what a failed load makes it
            recompute. Where no request of a forward has it only logits of last positions are
            computed, whose rounding may differ: compare runs that both have it, or both haven't.
        cancelled: asked before each forward; True ends the request.
    """

    id: str
    tokens: Sequence[int]
    max_new_tokens: int
    on_token: Callable[[int], None] | None = None
    on_logits: OnLogits | None = None
    cancelled: Callable[[], bool] = _never


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request's answer, and where the state of its prompt came from.

    Attributes:
        tokens: the answer.
        prompt_tokens: restored from this node, restored from another and recomputed, in sum.
        ttft_seconds: from the call to the first token.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    restored_local_tokens: int
    restored_remote_tokens: int
    recomputed_tokens: int
    ttft_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One request under way; its `Batch` alone changes it.

    Attributes:
        blocks: device blocks for all its tokens, in order; none before it was admitted and after
            it has ended.
        ticket: the load of its prefix, if it has one.
        computed: leading tokens of the prompt whose state is there, or is being loaded.
        restored: how many of them the tier had.
        pulled: how many of those came from another node.
        stored: leading tokens that the tier has, or is being given.
        answer: the tokens so far.
        begun: when it was submitted, on the clock of `time.perf_counter`.
        fault: why it ended without a whole answer.
    """

    request: Request
    prompt: Prompt
    blocks: tuple[int, ...] = ()
    ticket: Ticket | None = None
    computed: int = 0
    restored: int = 0
    pulled: int = 0
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    fault: RayHiCacheError | None = None
    begun: float
    ttft_seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.fault is not None or len(self.answer) == self.request.max_new_tokens

    @property
    def loading(self) -> bool:
        """Whether copies of its load are still to come."""
        return self.ticket is not None and self.ticket.state is TicketState.OPEN

    def check_cancelled(self) -> None:
        """Ask its caller.

        Raises:
            JobCancelled: the caller gave it up.
        """
        if self.request.cancelled():
            raise JobCancelled(
                asked=f"go on with request {self.request.id!r}",
                found="its caller gave it up",
                remedy="submit it again if it is still wanted",
            )

    def result(self) -> Generation:
        """The answer of a run that is done.

        Raises:
            RayHiCacheError: why there is none.
        """
        if self.fault is not None:
            raise self.fault
        assert self.done, "the run is still under way"
        remote = min(self.pulled, self.restored)
        return Generation(
            tokens=tuple(self.answer),
            prompt_tokens=len(self.prompt.tokens),
            restored_local_tokens=self.restored - remote,
            restored_remote_tokens=remote,
            recomputed_tokens=len(self.prompt.tokens) - self.restored,
            ttft_seconds=self.ttft_seconds,
        )
