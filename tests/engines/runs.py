"""Words for tests of engines: a tier in this process, prompts, and runs whose bits are kept."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from rayhicache.config import EngineSpec
from rayhicache.device.protocols import Event, Stream
from rayhicache.engines.models import config_of
from rayhicache.engines.request import Generation
from rayhicache.engines.transformers_engine import TransformersEngine
from rayhicache.memory.local import LocalPort
from rayhicache.memory.owner import ArenaOwner
from rayhicache.testing.faults import DeviceDecorator

PAGE, PREFIX, SUFFIX, NEW = 64, 448, 64, 16
LENGTH = PREFIX + SUFFIX
VOCAB = 512
SECONDS = 60.0

Prompt = Sequence[int]
Answer = TypeVar("Answer")


def prompt(number: int, length: int = LENGTH, *, vocab: int = VOCAB) -> list[int]:
    """Token ids; those of different numbers differ from the first page on."""
    dice = torch.Generator().manual_seed(number)
    tokens: list[int] = torch.randint(0, vocab, (length,), generator=dice).tolist()
    return tokens


def just_enough(**other: Any) -> EngineSpec:
    """A spec with no more blocks than one run takes: every run has the blocks of the last."""
    return EngineSpec(vocab_size=VOCAB, num_blocks=(LENGTH + NEW) // PAGE + 1, **other)


@contextlib.contextmanager
def local_engine(
    spec: EngineSpec, owner: ArenaOwner, *, device: DeviceDecorator | None = None, **options: Any
) -> Iterator[TransformersEngine]:
    """An engine on the owner's arena; it must end with every block free."""
    engine = TransformersEngine(spec, LocalPort(owner), device=device, **options)
    try:
        yield engine
        assert engine.settle(SECONDS)
    finally:
        closed = engine.close(SECONDS)
    assert closed
    engine.pools.allocator.check()
    assert engine.pools.allocator.num_free() == spec.num_blocks
    assert engine.pools.gate.open_tickets() == ()


@dataclass(frozen=True)
class Run:
    """One answer, and the digests of all logits of every forward, by its first position."""

    generation: Generation
    logits: dict[int, str]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.generation.tokens

    def computed_as(self, cold: Run) -> bool:
        """All tokens, and all logits of every forward of this run, are those of the cold one."""
        return self.tokens == cold.tokens and all(
            cold.logits[start] == digest for start, digest in self.logits.items()
        )


def run(engine: TransformersEngine, tokens: Prompt, new: int = NEW, **options: Any) -> Run:
    """Generate, and wait until the stores have ended, so that the next run has the same blocks."""
    logits: dict[int, str] = {}

    def seen(start: int, values: torch.Tensor) -> None:
        logits[start] = hashlib.blake2b(values.contiguous().numpy().data).hexdigest()

    generation = engine.generate("request", tokens, new, on_logits=seen, **options)
    assert engine.settle(SECONDS)
    return Run(generation=generation, logits=logits)


def require_sparse(spec: EngineSpec, length: int) -> None:
    """Where the index would choose every token, its corruption couldn't be seen at all."""
    config = config_of(spec)
    assert config.index_topk < length, "index_topk must be under the length of the sequence"
    assert config.index_n_heads >= 16, "few index heads tie at the cut"


class _WatchedStream:
    """The calling thread as a stream, which tells when it comes to a wait that isn't over."""

    name = "watched"

    def __init__(self, inner: Stream, blocked: threading.Event) -> None:
        self._inner = inner
        self._blocked = blocked

    def record(self, event: Event) -> None:
        self._inner.record(event)

    def wait(self, event: Event) -> None:
        if not event.query():
            self._blocked.set()
        self._inner.wait(event)


class Reader(threading.Thread, Generic[Answer]):
    """Runs a call in its own thread; `blocked` is set when it waits for a copy that isn't done."""

    def __init__(self, device: DeviceDecorator, call: Callable[[], Answer]) -> None:
        super().__init__(daemon=True)
        self.blocked = threading.Event()
        self._answer: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._device = device
        self._call = call
        self.start()

    def run(self) -> None:
        watched: Any = _WatchedStream(self._device.inner.current_stream(), self.blocked)
        with self._device.use(watched):
            try:
                self._answer.put(self._call())
            except BaseException as fault:
                self.fault = fault  # raised by `value`
                self._answer.put(fault)

    def value(self) -> Answer:
        """What the call returned; raises what it raised."""
        answer = self._answer.get(timeout=SECONDS)
        self.join(SECONDS)
        if isinstance(answer, BaseException):
            raise answer
        return answer
