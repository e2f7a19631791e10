"""An engine for models of transformers: one sequence a forward, greedy, on a tier.

    lookup ─ one call ─► load ─► the chunks that are left, each one page ─► store ─► decode
                          └── layers arrive while the first chunk runs ──┘

Chunks lie on the absolute grid of pages, so a restored run computes with the same shapes as a
cold one and gives the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayhicache.client import TierClient
from rayhicache.config import EngineSpec
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Device
from rayhicache.device.ticket import Ticket
from rayhicache.engines.models import build_model, identity_of
from rayhicache.engines.runner import ModelRunner, OnLogits
from rayhicache.errors import (
    GateTimeout,
    InvalidRequest,
    JobCancelled,
    LoadFailed,
    PromptTooLong,
    QueueFull,
    RayHiCacheError,
)
from rayhicache.memory.port import Port
from rayhicache.requests import Found, Load, Prompt

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """What a caller wants to see of a run; see `TransformersEngine.generate`."""

    on_token: Callable[[int], None] | None
    on_logits: OnLogits | None
    cancelled: Callable[[], bool]


@dataclass(slots=True)
class _Run:
    """One request under way: what it holds and how far it is."""

    id: str
    prompt: Prompt
    watch: _Watch
    blocks: list[int]
    ticket: Ticket | None = None
    restored: int = 0
    pulled: int = 0


class TransformersEngine:
    """A model, its pools and its way to the tier. One `generate` at a time.

    Device blocks are one page each. Only pages made wholly by prefill are stored: decoded ones
    differ by rounding from prefilled ones, and an answer is prefilled by the next turn.

    Args:
        port: to the owner of this node's arena.
        device: where the pools are; by default the host. Closed by `close`.
        page_tokens: tokens a page, and of a chunk of prefill.

    Raises:
        LayoutMismatch, NoLocalPool: as `TierClient`.
        InvalidLayout: the model's layers keep state of different shapes.
    """

    def __init__(
        self,
        spec: EngineSpec,
        port: Port,
        *,
        device: Device | None = None,
        page_tokens: int = 64,
        limits: CopyLimits | None = None,
    ) -> None:
        self.spec = spec
        self._page = page_tokens
        self._limits = limits or CopyLimits()
        self._device = device or CpuDevice(wait_seconds=self._limits.wait_seconds)
        self._runner = ModelRunner(
            build_model(spec), self._device, num_blocks=spec.num_blocks, block_tokens=page_tokens
        )
        self.pools = self._runner.pools
        self.client = TierClient(
            port, self.pools, identity_of(spec), page_tokens=page_tokens, limits=limits
        )
        self._stores: list[Ticket] = []

    def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        on_token: Callable[[int], None] | None = None,
        on_logits: OnLogits | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Answer a prompt. Blocks until the answer is there; its pages are stored meanwhile.

        A fault of the tier costs a recompute and never the request. Whatever happens, the
        request's blocks are given back and its leases end.

        Args:
            request_id: for messages.
            on_token: told each token as it is chosen, on this thread.
            on_logits: told of each forward, on this thread, its first position and all its
                logits, `dtype[tokens, vocab_size], device`; again for what a failed load makes
                it recompute. Without it only logits of last positions are computed, whose
                rounding may differ: compare runs that both have it, or both haven't.
            cancelled: asked before each forward; True ends the request.

        Raises:
            InvalidRequest: an empty prompt, no token asked for, or an id outside the vocabulary.
            PromptTooLong: prompt and answer don't fit the model or the device; nothing changed.
            JobCancelled: `cancelled` said so.
            QueueFull: device blocks are held by copies that don't end.
        """
        self._check(tokens, max_new_tokens)
        begun = time.perf_counter()
        prompt = self.client.prompt(tokens)
        found = self.client.lookup(prompt)
        try:
            blocks = self._allocate(self._blocks_for(len(tokens) + max_new_tokens - 1))
        except QueueFull:
            self.client.release(found)
            raise
        watch = _Watch(on_token=on_token, on_logits=on_logits, cancelled=cancelled)
        run = _Run(id=request_id, prompt=prompt, watch=watch, blocks=blocks)
        try:
            self._load(run, found)
            answer = [self._prefill(run)]
            ttft = time.perf_counter() - begun
            self._store(run)
            self._tell(run, answer[-1])
            self._decode(run, answer, max_new_tokens)
        finally:
            if run.ticket is not None:
                run.ticket.cancel()  # after the last copy this does nothing
            self.pools.free(run.blocks)
        remote = min(run.pulled, run.restored)
        return Generation(
            tokens=tuple(answer),
            prompt_tokens=len(tokens),
            restored_local_tokens=run.restored - remote,
            restored_remote_tokens=remote,
            recomputed_tokens=len(tokens) - run.restored,
            ttft_seconds=ttft,
        )

    def settle(self, timeout: float = 30.0) -> bool:
        """Block until the stores so far have ended, at most `timeout` seconds; False if not."""
        deadline = time.monotonic() + timeout
        self._stores = [
            ticket
            for ticket in self._stores
            if ticket.result(max(deadline - time.monotonic(), 0)) is None
        ]
        return not self._stores

    def close(self, timeout: float = 30.0) -> bool:
        """Close the client and the device. Idempotent; as `TierClient.close`."""
        closed = self.client.close(timeout)
        if closed:
            self._device.close()
        return closed

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _check(self, tokens: Sequence[int], max_new_tokens: int) -> None:
        vocabulary = self._runner.vocab_size
        if not tokens or max_new_tokens < 1:
            raise InvalidRequest(
                asked=f"generate {max_new_tokens} tokens after {len(tokens)}",
                found="there must be at least one of each",
                remedy="pass a prompt, and ask for a token",
            )
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise InvalidRequest(
                asked=f"generate after token ids from {min(tokens)} to {max(tokens)}",
                found=f"the model has ids from 0 to {vocabulary - 1}",
                remedy="use the tokenizer that fits the model",
            )
        total, room = len(tokens) + max_new_tokens, self.pools.num_blocks * self._page
        if total > self.spec.max_positions or self._blocks_for(total - 1) > self.pools.num_blocks:
            raise PromptTooLong(
                asked=f"generate {max_new_tokens} tokens after {len(tokens)}",
                found=f"the model takes {self.spec.max_positions} tokens and the device {room}",
                remedy="shorten the prompt, ask for fewer tokens, or raise the spec's limits",
            )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _allocate(self, count: int) -> list[int]:
        """Take blocks; where open stores hold them, wait for those, oldest first."""
        deadline = time.monotonic() + self._limits.copy_seconds
        while (blocks := self.pools.allocate(count)) is None:
            if not self._stores or not self._settle_oldest(deadline):
                raise QueueFull(
                    asked=f"take {count} device blocks",
                    found=f"{self.pools.allocator.num_free()} of {self.pools.num_blocks} are free, "
                    f"copies hold {self.pools.allocator.num_held()}",
                    remedy="see which copy stream hangs, or raise num_blocks",
                )
        return blocks

    def _settle_oldest(self, deadline: float) -> bool:
        if self._stores[0].result(max(deadline - time.monotonic(), 0)) is None:
            return False
        del self._stores[0]
        return True

    def _load(self, run: _Run, found: Found) -> None:
        if not found.tokens:
            return
        pages = found.tokens // self._page
        load = Load(id=run.id, found=found, blocks=run.blocks[:pages])
        try:
            run.ticket = self.client.load([load])
        except RayHiCacheError as fault:
            self.client.release(found)
            if not isinstance(fault, QueueFull):
                raise
            log.warning("request %s is computed, not restored: %s", run.id, fault)
            return
        run.restored, run.pulled = pages * self._page, found.pulled_tokens

    def _prefill(self, run: _Run) -> int:
        """Run the chunks that aren't restored; the first token. A failed load is recomputed."""
        try:
            return self._chunks(run)
        except LoadFailed as fault:
            log.warning("request %s is recomputed: %s", run.id, fault)
            assert run.ticket is not None
            # The blocks can be written once the ticket has let go of them.
            if run.ticket.result(self._limits.copy_seconds) is None:
                self._take_fresh_blocks(run)
        except GateTimeout as fault:
            log.warning("request %s is recomputed into fresh blocks: %s", run.id, fault)
            self._take_fresh_blocks(run)
        run.restored = 0
        return self._chunks(run)

    def _take_fresh_blocks(self, run: _Run) -> None:
        """Leave the blocks to the ticket, which holds them until its last copy has passed."""
        assert run.ticket is not None
        run.ticket.cancel()
        old, run.blocks = run.blocks, []
        self.pools.free(old)
        run.blocks = self._allocate(len(old))

    def _chunks(self, run: _Run) -> int:
        tokens = run.prompt.tokens
        sequence = self._runner.sequence(run.blocks)
        token = 0
        for start in range(run.restored, len(tokens), self._page):
            self._check_cancelled(run)
            chunk = tokens[start : start + self._page]
            token = sequence.forward(chunk, start, run.watch.on_logits)
        return token

    def _store(self, run: _Run) -> None:
        """Start storing the whole pages that prefill has made."""
        stop = len(run.prompt.tokens) // self._page * self._page
        if stop <= run.restored:
            return
        blocks = run.blocks[run.restored // self._page : stop // self._page]
        try:
            ticket = self.client.store(run.id, run.prompt, blocks, start=run.restored, stop=stop)
        except QueueFull as fault:
            log.warning("the pages of request %s aren't stored: %s", run.id, fault)
            return
        self._stores = [t for t in self._stores if t.result(0) is None]
        self._stores.append(ticket)

    def _decode(self, run: _Run, answer: list[int], max_new_tokens: int) -> None:
        sequence = self._runner.sequence(run.blocks)
        while len(answer) < max_new_tokens:
            self._check_cancelled(run)
            at = len(run.prompt.tokens) + len(answer) - 1
            answer.append(sequence.forward(answer[-1:], at, run.watch.on_logits))
            self._tell(run, answer[-1])

    def _tell(self, run: _Run, token: int) -> None:
        if run.watch.on_token is not None:
            run.watch.on_token(token)

    def _check_cancelled(self, run: _Run) -> None:
        if run.watch.cancelled():
            raise JobCancelled(
                asked=f"go on with request {run.id!r}",
                found="its caller gave it up",
                remedy="submit it again if it is still wanted",
            )
