"""Two nodes on this machine, a sparse-attention model, chats that come back, and the proof.

    python examples/quickstart.py [--show-race]

Six users chat with a model over Python's own sources: a long opening, then short turns. Each
turn's prompt is the whole chat so far, so most of it was computed before: the tier restores it
from host memory, on the node that computed it or, when that node has a queue, on the other one,
which pulls it. At the end every answer is compared with one that was computed without a tier.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import rayhicache as hc
from rayhicache.engines.tokenizer import encode
from rayhicache.testing.cold import cold_engine
from rayhicache.testing.race import show_race

RESULTS = Path("build/demo.json")
OPENING_TOKENS = 512
TURN_TOKENS = 96
ANSWER_TOKENS = 16
SOURCES = (
    "argparse",
    "ast",
    "bdb",
    "calendar",
    "cmd",
    "codecs",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "dis",
    "doctest",
    "fractions",
    "ftplib",
    "heapq",
    "inspect",
)


@dataclass
class Chat:
    """One user's conversation.

    Attributes:
        text: what the user says, turn after turn, as token ids.
        history: all that was said so far, by both.
        workers: who answered each turn.
    """

    text: list[int]
    history: list[int] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)

    def ask(self) -> list[int]:
        """The prompt of the next turn: the chat so far and what the user says now."""
        turn = len(self.workers)
        self.history += self.text[said_before(turn) : said_before(turn + 1)]
        return list(self.history)

    def hear(self, answer: hc.Output) -> None:
        """The model's answer becomes part of the chat."""
        self.history += answer.tokens
        self.workers.append(answer.report.worker)

    @property
    def moved(self) -> bool:
        """Whether several workers have answered it."""
        return len(set(self.workers)) > 1


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer."""

    prompt: list[int]
    answer: hc.Output


@dataclass(frozen=True)
class ColdRun:
    """What a run without a tier answered to the same prompts, and how fast."""

    answers: list[tuple[int, ...]]
    ttft_seconds: list[float]


def said_before(turn: int) -> int:
    """How many tokens a user has said before a turn."""
    return OPENING_TOKENS + (turn - 1) * TURN_TOKENS if turn else 0


def make_chats(count: int, turns: int) -> list[Chat]:
    """Chats over real text: each user reads another module of the standard library aloud."""
    chats = []
    for name in SOURCES[:count]:
        tokens = encode(inspect.getsource(importlib.import_module(name)))
        chats.append(Chat(text=tokens[: said_before(turns)]))
    return chats


def waves(chats: Sequence[Chat]) -> list[list[Chat]]:
    """Groups of chats that come back at once: those whom the same worker answered last.

    All of a group would like to stay where their pages are. That worker's queue grows while the
    other's is empty, and the router sends some over as soon as waiting costs more than pulling.
    """
    groups: dict[str, list[Chat]] = {}
    for chat in chats:
        groups.setdefault(chat.workers[-1] if chat.workers else "", []).append(chat)
    return [groups[worker] for worker in sorted(groups)]


def serve(
    cluster: hc.Cluster, chats: Sequence[Chat], turns: int, step: Callable[[int], None]
) -> list[Exchange]:
    """Let the chats talk to the cluster; all prompts and answers."""
    exchanges = []
    for _ in range(turns):
        for wave in waves(chats):
            prompts = [chat.ask() for chat in wave]
            job = cluster.submit(hc.GenerateJob(prompts=prompts, max_new_tokens=ANSWER_TOKENS))
            for _token in job.stream():
                step(1)
            for chat, prompt, answer in zip(wave, prompts, job.result().outputs, strict=True):
                chat.hear(answer)
                exchanges.append(Exchange(prompt, answer))
            cluster.settle()  # people read before they type: the pages are stored meanwhile
    return exchanges


def run_cold(
    spec: hc.EngineSpec, exchanges: Sequence[Exchange], step: Callable[[int], None]
) -> ColdRun:
    """Answer the same prompts with the same engine and no tier, one after the other."""
    torch.set_num_threads(1)  # as a worker does
    run = ColdRun([], [])
    with cold_engine(spec) as engine:
        engine.generate("warm-up", exchanges[0].prompt, 2)
        for number, exchange in enumerate(exchanges):
            made = engine.generate(
                str(number), exchange.prompt, ANSWER_TOKENS, on_token=lambda _: step(1)
            )
            run.answers.append(made.tokens)
            run.ttft_seconds.append(made.ttft_seconds)
    return run


def summary(exchanges: Sequence[Exchange], cold: ColdRun) -> dict[str, float | bool]:
    """The figures of `build/demo.json`. Times are of the prompts that were restored, both ways."""
    reports = [exchange.answer.report for exchange in exchanges]
    prompt_tokens = sum(r.prompt_tokens for r in reports)
    local = sum(r.restored_local_tokens for r in reports)
    remote = sum(r.restored_remote_tokens for r in reports)
    pairs = [
        (seconds, report.ttft_seconds)
        for seconds, report in zip(cold.ttft_seconds, reports, strict=True)
        if report.recomputed_tokens < report.prompt_tokens
    ]
    return {
        "requests": len(reports),
        "prompt_tokens": prompt_tokens,
        "restored_local_tokens": local,
        "restored_remote_tokens": remote,
        "recomputed_tokens": sum(r.recomputed_tokens for r in reports),
        "hit_rate": (local + remote) / prompt_tokens,
        "ttft_cold_ms_p50": 1000 * statistics.median([c for c, _ in pairs] or [0.0]),
        "ttft_restored_ms_p50": 1000 * statistics.median([r for _, r in pairs] or [0.0]),
        "identical": cold.answers == [exchange.answer.tokens for exchange in exchanges],
    }


def draw(console: Console, figures: dict[str, float | bool], chats: Sequence[Chat]) -> None:
    """Show the figures and the verdict."""
    table = Table(title="Chats over two nodes", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, key in (
        ("requests", "requests"),
        ("prompt tokens", "prompt_tokens"),
        ("  restored from the own node", "restored_local_tokens"),
        ("  restored from the other node", "restored_remote_tokens"),
        ("  recomputed", "recomputed_tokens"),
    ):
        table.add_row(label, f"{figures[key]:,}")
    table.add_row("hit rate", f"{figures['hit_rate']:.1%}")
    table.add_row("chats that moved", f"{sum(c.moved for c in chats)} of {len(chats)}")
    table.add_row("first token after, cold", f"{figures['ttft_cold_ms_p50']:,.0f} ms")
    table.add_row("first token after, restored", f"{figures['ttft_restored_ms_p50']:,.0f} ms")
    console.print(table)
    if figures["identical"]:
        console.print("[green]Every answer is bit-identical to a cold run.[/green]")
    else:
        console.print("[red]Some answers differ from a cold run.[/red]")


def race(console: Console, spec: hc.EngineSpec, chats: Sequence[Chat]) -> None:
    """Show what the gate is for: take it away from one pool whose copies are late."""
    prompt, other = (chat.history[:OPENING_TOKENS] for chat in chats[:2])
    for pool in ("kv", "index"):
        found = show_race(spec, prompt, other, 2 * ANSWER_TOKENS, pool=pool)
        console.print(
            f"The {pool} pool's copies are late. Without its gate {found.differing} of "
            f"{found.tokens} tokens differ, under it {found.differing_gated}."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 if pages came from both nodes and every answer is the same."""
    parser = argparse.ArgumentParser(description="Chats over a tier of two nodes.")
    parser.add_argument("--chats", type=int, default=6, choices=range(2, len(SOURCES) + 1))
    parser.add_argument("--turns", type=int, default=4, choices=range(2, 9))
    parser.add_argument("--show-race", action="store_true", help="show what the gate prevents")
    arguments = parser.parse_args(argv)

    console = Console()
    config = hc.ClusterConfig(name="quickstart", local_nodes=2)
    chats = make_chats(arguments.chats, arguments.turns)
    tokens = arguments.chats * arguments.turns * ANSWER_TOKENS
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        starting = progress.add_task("starting two nodes", total=1)
        with hc.launch(config) as cluster:
            progress.advance(starting)
            warm = progress.add_task("tokens, with the tier", total=tokens)
            exchanges = serve(cluster, chats, arguments.turns, partial(progress.advance, warm))
        without = progress.add_task("tokens, without", total=tokens)
        cold = run_cold(config.engine, exchanges, partial(progress.advance, without))

    figures = summary(exchanges, cold)
    draw(console, figures, chats)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Figures: {RESULTS}")
    if arguments.show_race:
        race(console, config.engine, chats)
    both = figures["restored_local_tokens"] > 0 and figures["restored_remote_tokens"] > 0
    return 0 if both and figures["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
