"""An engine without a tier, to compare with: what it answers is what a cold run answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rayhicache.config import EngineSpec
from rayhicache.core.hits import MISS, Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.outcomes import Reserved
from rayhicache.device.protocols import Device
from rayhicache.engines.transformers_engine import TransformersEngine
from rayhicache.memory.local import LocalPort, arena_owner


class EmptyPort(LocalPort):
    """A `Port` that finds nothing and has no room: every run over it computes all its tokens."""

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        """See `Port.lookup`; always a miss."""
        return MISS

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        """See `Port.reserve`; there is never room."""
        return None


@contextlib.contextmanager
def local_engine(
    spec: EngineSpec,
    port: LocalPort,
    *,
    device: Device | None = None,
    page_tokens: int = 64,
) -> Iterator[TransformersEngine]:
    """An engine in this process, closed afterwards."""
    engine = TransformersEngine(spec, port, device=device, page_tokens=page_tokens)
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def cold_engine(spec: EngineSpec, *, page_tokens: int = 64) -> Iterator[TransformersEngine]:
    """An engine that restores nothing and stores nothing, in this process."""
    with (
        arena_owner() as owner,
        local_engine(spec, EmptyPort(owner, client="cold"), page_tokens=page_tokens) as engine,
    ):
        yield engine
