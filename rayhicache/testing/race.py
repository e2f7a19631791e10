"""The race that the gate is for, made to happen every time.

The copies of one pool are held, and a forward reads that pool without its gate: what it sees is
whatever the device's pages held before, here the state of another prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayhicache.config import EngineSpec
from rayhicache.device.cpu import CpuDevice
from rayhicache.memory.local import LocalPort, arena_owner
from rayhicache.testing.cold import local_engine
from rayhicache.testing.faults import HoldingDevice, ungated

LATE_SECONDS = 30.0
HOLD_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """What a late pool did to one answer.

    Attributes:
        pool: whose copies were late.
        tokens: of the answer.
        differing: tokens other than the cold run's when the pool's gate was taken away.
        differing_gated: the same under the gate, the copies as late; 0 is what is promised.
    """

    pool: str
    tokens: int
    differing: int
    differing_gated: int


def show_race(
    spec: EngineSpec,
    prompt: Sequence[int],
    other: Sequence[int],
    max_new_tokens: int,
    *,
    pool: str,
    page_tokens: int = 64,
) -> RaceResult:
    """Answer a prompt cold, then restored under and without the gate of a pool that is late.

    Args:
        prompt: of at least one page and a token.
        other: another prompt, of the same length, whose state the device's pages hold.
        pool: name of a pool of the model, as in `kv` and `index`.

    Raises:
        UnknownPool: the model has no such pool.
    """
    assert len(prompt) == len(other), "the other prompt must fill the same pages"
    blocks = -(-(len(prompt) + max_new_tokens) // page_tokens)
    spec = replace(spec, num_blocks=blocks)  # so that every run has the same pages
    device = HoldingDevice(CpuDevice(), {pool})
    with (
        arena_owner() as owner,
        local_engine(spec, LocalPort(owner), device=device, page_tokens=page_tokens) as engine,
    ):

        def answer(tokens: Sequence[int]) -> tuple[int, ...]:
            return engine.generate("race", tokens, max_new_tokens).tokens

        try:
            cold = answer(prompt)
            engine.settle()
            answer(other)
            engine.settle()
            with ungated(engine.pools, {pool}):
                garbled = answer(prompt)
            late = engine.pools.gate.open_tickets()
        finally:
            device.release()
        for ticket in late:
            ticket.result(LATE_SECONDS)  # the pages are the next run's once the copies have passed
        answer(other)
        engine.settle()
        device.hold()
        release = threading.Timer(HOLD_SECONDS, device.release)
        release.start()  # the run waits for it, however long that takes
        gated = answer(prompt)
        release.join()
    return RaceResult(
        pool=pool,
        tokens=len(cold),
        differing=sum(a != b for a, b in zip(cold, garbled, strict=True)),
        differing_gated=sum(a != b for a, b in zip(cold, gated, strict=True)),
    )
