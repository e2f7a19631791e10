"""Requests that are answered together: who is in the next forward, and what came of it.

    submit ──► waiting ──blocks, lookup, load──► prefilling ──last chunk, store──► decoding ──► done
                                                  └─ a failed load: from the start again

A forward takes chunks of prompts or the next token of every running answer, never both. Chunks
lie on one absolute grid, so a restored prompt is computed in the shapes of a cold one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from rayhicache.client import TierClient
from rayhicache.engines.request import Request, Run
from rayhicache.engines.room import Room
from rayhicache.engines.runner import ModelRunner
from rayhicache.engines.sequence import Row
from rayhicache.errors import GateTimeout, JobCancelled, LoadFailed, QueueFull, RayHiCacheError
from rayhicache.requests import Load

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How an engine makes up its forwards.

    Attributes:
        chunk_tokens: of a chunk of prefill, whole pages. What the tier has is restored up to a
            boundary of chunks.
        rows_max: requests that hold device blocks at once, and the most in one decode.
        prefill_rows: requests whose chunks one forward may take. With one a prompt's state
            doesn't depend on which others are there; with more, equal batches give equal bits.
        store_pages: pages of one store; those of a long prompt begin while it is prefilled.
        copy_seconds: how long a failed load may hold the blocks that are to be computed anew.
    """

    chunk_tokens: int
    rows_max: int = 64
    prefill_rows: int = 1
    store_pages: int = 256
    copy_seconds: float = 60.0


class Batch:
    """Requests on one engine. Use it as `with`: at its end what isn't done gives all back.

    Every forward binds the blocks of its own rows, so it waits, layer by layer, for the loads of
    these alone: answers that run go on while a new request's prefix is loaded.

    One thread; two batches of an engine may take turns. What a caller's own function raises comes
    out of the call that ran it, and the batch is then of no use but to be closed.
    """

    def __init__(
        self, runner: ModelRunner, client: TierClient, room: Room, limits: BatchLimits
    ) -> None:
        self._runner = runner
        self._client = client
        self._room = room
        self._limits = limits
        self._page = client.layout.page_tokens
        self._waiting: list[Run] = []
        self._prefilling: list[Run] = []
        self._decoding: list[Run] = []
        self._decode_next = False

    @property
    def busy(self) -> bool:
        """Whether a request isn't done."""
        return bool(self._waiting or self._prefilling or self._decoding)

    def submit(self, request: Request) -> Run:
        """Queue a request that the engine has checked. Computes nothing yet."""
        begun = time.perf_counter()
        run = Run(request=request, prompt=self._client.prompt(request.tokens), begun=begun)
        self._waiting.append(run)
        return run

    def step(self) -> bool:
        """One forward, chosen so that nobody stalls; whether a request isn't done.

        Chunks and decodes take turns. While others decode, a request whose load is under way
        lets them go on; with nobody to let go on, it starts at once and its first forward waits
        layer by layer. Who shares a decode thus depends on when loads end: for answers that
        repeat bit for bit use `run`.

        A new request's lookup blocks all; where other nodes hold its prefix, for the pull.
        """
        self._admit(wait=not self._decoding)
        ready = [run for run in self._prefilling if not (self._decoding and run.loading)]
        if ready and not (self._decode_next and self._decoding):
            self._prefill(ready[: self._limits.prefill_rows])
            self._decode_next = True
        elif self._decoding:
            self._decode()
            self._decode_next = False
        return self.busy

    def run(self) -> None:
        """Answer all: first every prompt is computed, then all decode together.

        Chunks and batches depend on the requests alone, in the order in which they were
        submitted, and on nothing that takes time. So a batch whose prefixes are restored, each
        to another length, gives bit for bit the answers of the same batch computed from the
        start, with one request in a forward of prefill; with more of them, if the same ones
        share each forward. Requests that find no room wait for the others' end.
        """
        while self.busy:
            self._admit(wait=True)
            while self._prefilling:
                self._prefill(self._prefilling[: self._limits.prefill_rows])
            while self._decoding:
                self._decode()

    def close(self) -> None:
        """End what isn't done: its blocks are given back and its leases end. Idempotent."""
        for run in (*self._prefilling, *self._decoding):
            self._give_back(run)
        for runs in (self._waiting, self._prefilling, self._decoding):
            runs.clear()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ── admission ───────────────────────────────────────────────────────────────────────────

    def _admit(self, *, wait: bool) -> None:
        """Give blocks to those who wait, in order, and start their loads."""
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._limits.rows_max:
            run = self._waiting[0]
            tokens = len(run.prompt.tokens) + run.request.max_new_tokens - 1
            count = -(-tokens // self._page)
            blocks = self._room.take_now(count)
            if blocks is None and wait:
                try:
                    blocks = self._room.take(count)
                except QueueFull as fault:
                    if not (self._prefilling or self._decoding):
                        del self._waiting[0]
                        run.fault = fault
                        continue
            if blocks is None:
                return
            del self._waiting[0]
            run.blocks = tuple(blocks)
            self._prefilling.append(run)
            self._load(run)

    def _load(self, run: Run) -> None:
        """Look the prompt up and start loading what the grid of chunks can use of it."""
        found = self._client.lookup(run.prompt)
        chunk = self._limits.chunk_tokens
        tokens = found.tokens // chunk * chunk
        if not tokens:
            self._client.release(found)
            return
        load = Load(id=run.request.id, found=found, blocks=run.blocks[: tokens // self._page])
        try:
            run.ticket = self._client.load([load])
        except RayHiCacheError as fault:
            self._client.release(found)
            if not isinstance(fault, QueueFull):
                raise
            log.warning("request %s is computed, not restored: %s", run.request.id, fault)
            return
        run.computed = run.restored = run.stored = tokens
        run.pulled = found.pulled_tokens

    # ── forwards ────────────────────────────────────────────────────────────────────────────

    def _prefill(self, runs: Sequence[Run]) -> None:
        """One forward over the next chunk of each; those at their end start to decode."""
        runs = self._wanted(runs)
        rows = []
        for run in runs:
            chunk, tokens = self._limits.chunk_tokens, run.prompt.tokens
            stop = min(run.computed // chunk * chunk + chunk, len(tokens))
            rows.append(
                Row(blocks=run.blocks, tokens=tokens[run.computed : stop], start=run.computed)
            )
        try:
            logits = self._forward(runs, rows)
        except (LoadFailed, GateTimeout) as fault:
            self._recompute(runs, fault)
            return
        ending = []
        for at, (run, row) in enumerate(zip(runs, rows, strict=True)):
            run.computed = row.stop
            if row.stop == len(run.prompt.tokens):
                ending.append(at)
            elif row.stop - run.stored >= self._limits.store_pages * self._page:
                self._store(run)
        if ending:
            # Chunks that don't end a prompt need no token, and the host needn't wait for them.
            tokens = logits[ending, -1].argmax(dim=-1).tolist()
            for at, token in zip(ending, tokens, strict=True):
                self._start_decoding(runs[at], token)

    def _decode(self) -> None:
        """One forward over the next token of every running answer."""
        runs = self._wanted(self._decoding)
        rows = [
            Row(
                blocks=run.blocks,
                tokens=run.answer[-1:],
                start=len(run.prompt.tokens) + len(run.answer) - 1,
            )
            for run in runs
        ]
        try:
            logits = self._forward(runs, rows)
        except LoadFailed as fault:
            # Its prefix had landed when it was prefilled: the copy stream itself broke since.
            lost = _loaded_by(runs, fault)
            if not lost:
                raise
            for run in lost:
                self._end(run, fault)
            return
        for run, token in zip(runs, logits[:, -1].argmax(dim=-1).tolist(), strict=True):
            self._tell(run, token)

    def _forward(self, runs: Sequence[Run], rows: Sequence[Row]) -> torch.Tensor:
        """Logits, `dtype[rows, tokens or 1, vocab_size]`; empty for no rows."""
        if not rows:
            return torch.empty((0, 1, self._runner.vocab_size))
        whole = any(run.request.on_logits is not None for run in runs)
        logits = self._runner.forward(rows, whole=whole)
        for run, row, mine in zip(runs, rows, logits, strict=True):
            if run.request.on_logits is not None:
                run.request.on_logits(row.start, mine[-len(row.tokens) :])
        return logits

    def _wanted(self, runs: Sequence[Run]) -> list[Run]:
        """Those whose callers still want an answer; the others end."""
        wanted = []
        for run in list(runs):
            try:
                run.check_cancelled()
            except JobCancelled as fault:
                self._end(run, fault)
            else:
                wanted.append(run)
        return wanted

    def _start_decoding(self, run: Run, token: int) -> None:
        self._prefilling.remove(run)
        self._decoding.append(run)
        run.ttft_seconds = time.perf_counter() - run.begun
        self._store(run)
        self._tell(run, token)

    def _tell(self, run: Run, token: int) -> None:
        run.answer.append(token)
        if run.request.on_token is not None:
            run.request.on_token(token)
        if run.done:
            self._decoding.remove(run)
            self._give_back(run)

    def _store(self, run: Run) -> None:
        """Start storing the whole pages that prefill has made and that aren't stored yet."""
        page, most = self._page, self._limits.store_pages * self._page
        end = run.computed // page * page
        for start in range(run.stored, end, most):
            stop = min(start + most, end)
            blocks = run.blocks[start // page : stop // page]
            try:
                ticket = self._client.store(
                    run.request.id, run.prompt, blocks, start=start, stop=stop
                )
            except QueueFull as fault:
                log.warning("pages of request %s aren't stored: %s", run.request.id, fault)
                continue
            self._room.add_store(ticket)
        run.stored = max(run.stored, end)

    # ── ends ────────────────────────────────────────────────────────────────────────────────

    def _recompute(self, runs: Sequence[Run], fault: LoadFailed | GateTimeout) -> None:
        """Those whose loads failed start anew; the others only repeat the forward."""
        if isinstance(fault, LoadFailed):
            lost = _loaded_by(runs, fault)
        else:
            lost = [run for run in runs if run.loading]
        if not lost:
            raise fault
        for run in lost:
            assert run.ticket is not None
            log.warning("request %s is recomputed: %s", run.request.id, fault)
            run.computed = run.restored = run.stored = 0
            # The blocks can be written once the ticket has let go of them.
            in_time = self._limits.copy_seconds if isinstance(fault, LoadFailed) else 0
            if run.ticket.result(in_time) is None:
                self._take_fresh_blocks(run)
            run.ticket = None

    def _take_fresh_blocks(self, run: Run) -> None:
        """Leave the blocks to the ticket, which holds them until its last copy has passed."""
        count = len(run.blocks)
        self._give_back(run)
        try:
            run.blocks = tuple(self._room.take(count))
        except QueueFull as fault:
            self._end(run, fault)

    def _end(self, run: Run, fault: RayHiCacheError) -> None:
        """It gets no answer, or no more of it."""
        for runs in (self._prefilling, self._decoding):
            if run in runs:
                runs.remove(run)
        self._give_back(run)
        run.fault = fault

    def _give_back(self, run: Run) -> None:
        if run.ticket is not None:
            run.ticket.cancel()  # after the last copy this does nothing
        blocks, run.blocks = run.blocks, ()
        self._room.give_back(blocks)


def _loaded_by(runs: Sequence[Run], fault: LoadFailed) -> list[Run]:
    return [run for run in runs if run.ticket is not None and run.ticket.id in fault.tickets]
