"""Answers that run while the tier writes: seconds a token, by what the tier does meanwhile."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from enum import Enum

from benchmarks.engine import PAGE, SECONDS, Setup, prompt
from rayhicache.device.ticket import Ticket
from rayhicache.engines.request import Request
from rayhicache.engines.transformers_engine import TransformersEngine


class Mode(Enum):
    """What the tier does while answers run."""

    NOTHING = "no tier"
    THROUGH = "written through"
    BUSY = "store lane never idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Mean seconds a token of each of so many sessions, by mode, and what was written, B/s."""

    sessions: int
    seconds: dict[Mode, float]
    written: dict[Mode, float]


class Writer:
    """Makes the tier write pages whose keys it has never seen, from blocks of its own."""

    def __init__(self, engine: TransformersEngine, setup: Setup) -> None:
        self._engine = engine
        self._tokens = prompt(1, setup.lane_pages * PAGE, setup)
        blocks = engine.pools.allocate(setup.lane_pages)
        assert blocks is not None
        self._blocks = blocks
        self._names = itertools.count()
        self._open: list[Ticket] = []
        self._owed = 0.0
        self.pages = 0

    def owe(self, tokens: float) -> None:
        """Write whole pages as soon as so many tokens more make some."""
        self._owed += tokens
        while pages := min(int(self._owed) // PAGE, len(self._blocks)):
            self._owed -= pages * PAGE
            self._write(pages)

    def fill(self, tickets: int = 4) -> None:
        """Keep so many stores open."""
        self._open = [ticket for ticket in self._open if ticket.result(0) is None]
        while len(self._open) < tickets:
            self._write(len(self._blocks))

    def settle(self) -> None:
        """Wait until what was started has ended."""
        for ticket in self._open:
            assert ticket.result(SECONDS), "a store doesn't end"
        self._open.clear()

    def close(self) -> None:
        """Give the blocks back."""
        self.settle()
        self._engine.pools.free(self._blocks)

    def _write(self, pages: int) -> None:
        client, tokens = self._engine.client, self._tokens[: pages * PAGE]
        named = client.prompt(tokens, salt=f"written {next(self._names)}")
        self._open.append(client.store("w", named, self._blocks[:pages], stop=len(tokens)))
        self.pages += pages


class Stopwatch:
    """Times the steps of running answers, each in the mode that was set before it.

    It is told the tokens of one of them: the first comes from its prefill, at the second all
    run, and from then on each closes a step.
    """

    def __init__(
        self, engine: TransformersEngine, setup: Setup, sessions: int, writer: Writer
    ) -> None:
        self._engine = engine
        turns = [mode for mode in Mode for _ in range(setup.steps)]
        self._turns = iter(turns * setup.cycles)
        self.tokens = len(turns) * setup.cycles + 2
        self._rate = setup.written_per_token * sessions
        self._writer = writer
        self._told = 0
        self._mode: Mode | None = None
        self._begun = 0.0
        self.seconds: dict[Mode, list[float]] = {mode: [] for mode in Mode}
        self.pages = dict.fromkeys(Mode, 0)

    def token(self, _: int) -> None:
        """A step has ended; begin the next."""
        now = time.perf_counter()
        self._told += 1
        if self._told == 1:
            return
        if self._told == 2:
            assert self._engine.settle(SECONDS)  # the pages of the prompts themselves
        if self._mode is not None:
            self.seconds[self._mode].append(now - self._begun)
        mode = next(self._turns, None)
        if mode is not self._mode:
            self._writer.settle()
        self._mode = mode
        self._begun = time.perf_counter()
        before = self._writer.pages
        if mode is Mode.THROUGH:
            self._writer.owe(self._rate)
        elif mode is Mode.BUSY:
            self._writer.fill()
        if mode is not None:
            self.pages[mode] += self._writer.pages - before


def run_sessions(engine: TransformersEngine, setup: Setup, count: int) -> Running:
    """Answers that run at once, all of them prefilled before."""
    writer = Writer(engine, setup)
    watch = Stopwatch(engine, setup, count, writer)

    requests = [
        Request(
            id=f"session {at}",
            tokens=prompt(1000 * count + at, setup.turn, setup),
            max_new_tokens=watch.tokens,
            on_token=watch.token if at == 0 else None,
        )
        for at in range(count)
    ]
    engine.generate_batch(requests)
    writer.close()
    page_bytes = engine.client.layout.shape().nbytes
    return Running(
        sessions=count,
        seconds={mode: statistics.fmean(times) for mode, times in watch.seconds.items()},
        written={
            mode: watch.pages[mode] * page_bytes / sum(times)
            for mode, times in watch.seconds.items()
        },
    )
