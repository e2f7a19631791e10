"""Time to the first token, cold against restored, and what writing through costs running answers.

    python -m benchmarks.ttft           a model of 3.2 billion parameters; needs an NVIDIA GPU
    python -m benchmarks.ttft --tiny    a tiny one on the host, to see that it runs

The model is made on the spot with random weights; owner and engine are one process. A restored
prompt's lower bound is the time of one contiguous copy of its pages' bytes, measured in the same
run. Running answers are timed step by step in turns: with no ticket open, which costs one
comparison a forward; while the tier writes as many tokens as turns of 2,048 prompt tokens for
128 of answer make; and while its store lane is never idle. Draws `results/ttft.png` where
matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import report
from benchmarks.engine import (
    FULL,
    PAGE,
    SECONDS,
    SUFFIX,
    TINY,
    Mapped,
    Setup,
    bare_copy,
    engine_of,
    prompt,
)
from benchmarks.report import Row, finish
from benchmarks.running import Mode, Running, run_sessions
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Device
from rayhicache.engines.transformers_engine import TransformersEngine

PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Seconds to the first token after a prefix of that many tokens.

    Attributes:
        bound: seconds of a bare copy of the prefix's pages.
        alike: the part of the restored runs that gave the cold run's token.
    """

    prefix: int
    cold: float
    restored: float
    bound: float
    alike: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the host")
    if parser.parse_args(arguments).tiny:
        for row in rows_of(*measure(TINY, CpuDevice())):
            print(f"{row.name:<60} {row.value:>10.4f} {row.unit}")
        return 0
    from benchmarks.gpu import hardware

    first, running = measure(FULL, Mapped())
    draw(first, running)
    gpu, driver = hardware()
    return finish("ttft", rows_of(first, running), PACKAGES, hardware=gpu, driver=driver)


def measure(setup: Setup, device: Device) -> tuple[list[FirstToken], list[Running]]:
    """Both measurements, on one engine, which is closed afterwards with the device."""
    seconds_per_byte = bare_copy(device)
    with engine_of(setup, device) as engine:
        engine.generate("warm-up", prompt(0, 2 * setup.chunk + SUFFIX, setup), 4)
        first = [first_token(engine, setup, n, seconds_per_byte) for n in setup.prefixes]
        running = [run_sessions(engine, setup, count) for count in setup.sessions]
    return first, running


def first_token(
    engine: TransformersEngine, setup: Setup, prefix: int, seconds_per_byte: float
) -> FirstToken:
    """A prompt that the tier doesn't have, then the same one again and again."""
    tokens = prompt(prefix, prefix + SUFFIX, setup)
    cold = engine.generate("cold", tokens, 1)
    assert cold.restored_local_tokens == 0
    assert engine.settle(SECONDS), "the stores don't end"
    times, alike = [], 0
    for _ in range(setup.restores):
        warm = engine.generate("warm", tokens, 1)
        assert warm.restored_local_tokens == prefix
        alike += warm.tokens == cold.tokens
        times.append(warm.ttft_seconds)
    nbytes = prefix // PAGE * engine.client.layout.shape().nbytes
    return FirstToken(
        prefix=prefix,
        cold=cold.ttft_seconds,
        restored=statistics.median(times),
        bound=nbytes * seconds_per_byte,
        alike=alike / setup.restores,
    )


def rows_of(first: Sequence[FirstToken], running: Sequence[Running]) -> list[Row]:
    """The table."""
    rows = []
    for found in first:
        name = f"first token after {found.prefix:,} tokens"
        rows += [
            Row(name=f"{name}, cold", value=found.cold, unit="s", limit=found.bound),
            Row(name=f"{name}, restored", value=found.restored, unit="s", limit=found.bound),
            Row(
                name=f"{name}, restored over its bound",
                value=found.restored / found.bound,
                unit="x",
                limit=1.0,
            ),
            Row(
                name=f"{name}, restored as cold",
                value=found.alike,
                unit="of runs",
                must=1.0,
                smaller_is_better=False,
            ),
        ]
    for at in running:
        name = f"a token of {at.sessions} sessions"
        alone = at.seconds[Mode.NOTHING]
        rows.append(Row(name=f"{name}, {Mode.NOTHING.value}", value=alone * 1e3, unit="ms"))
        for mode, must in ((Mode.THROUGH, 1.05), (Mode.BUSY, None)):
            rows += [
                Row(
                    name=f"{name}, {mode.value}",
                    value=at.seconds[mode] / alone,
                    unit="x",
                    limit=1.0,
                    must=must,
                ),
                Row(
                    name=f"{name}, {mode.value}: written",
                    value=at.written[mode] / 1e9,
                    unit="GB/s",
                    smaller_is_better=False,
                ),
            ]
    return rows


def draw(first: Sequence[FirstToken], running: Sequence[Running]) -> None:
    """`results/ttft.png`: first tokens on the left, running answers on the right."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib as plotting

    plotting.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    lengths = [found.prefix for found in first]
    left.plot(lengths, [f.cold for f in first], marker="o", label="cold")
    left.plot(lengths, [f.restored for f in first], marker="o", label="restored")
    left.plot(lengths, [f.bound for f in first], linestyle="--", label="bare copy of the pages")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xlabel("prefix, tokens")
    left.set_ylabel("time to first token, s")
    for mode in (Mode.THROUGH, Mode.BUSY):
        ratios = [at.seconds[mode] / at.seconds[Mode.NOTHING] for at in running]
        right.plot([str(at.sessions) for at in running], ratios, marker="o", label=mode.value)
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set_xlabel("sessions")
    right.set_ylabel("time per output token over no tier")
    for plot in (left, right):
        plot.grid(visible=True, alpha=0.3)
        plot.legend()
    figure.tight_layout()
    report.RESULTS.mkdir(exist_ok=True)
    figure.savefig(report.RESULTS / "ttft.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
