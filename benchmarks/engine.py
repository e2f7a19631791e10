"""What the engine's benchmarks share: a model made on the spot, its engine, and a bare copy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rayhicache.config import EngineSpec
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Device
from rayhicache.engines.batch import BatchLimits
from rayhicache.engines.transformers_engine import TransformersEngine
from rayhicache.memory.local import LocalPort, arena_owner

PAGE = 64
SUFFIX = 64  # tokens after the prefix, which are always computed
SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is measured.

    Attributes:
        chunk: tokens of a chunk of prefill.
        prefixes: lengths in tokens, whole chunks; the last is the longest that fits.
        restores: restored runs of each, of which the median counts.
        sessions: how many answers run at once.
        turn: prompt tokens of each of them.
        written_per_token: tokens that a session makes the tier write for each token it answers.
        steps, cycles: of a mode at a time, and how often all modes take a turn.
        lane_pages: pages of one store where the lane is kept busy.
    """

    spec: EngineSpec
    arena_bytes: int
    chunk: int
    prefixes: tuple[int, ...]
    restores: int
    sessions: tuple[int, ...]
    turn: int
    written_per_token: int = 16
    steps: int = 12
    cycles: int = 4
    lane_pages: int = 64


# 112 KiB a token: the longest prefix is 14 GiB of the arena's 20, and as much of the GPU.
FULL = Setup(
    spec=EngineSpec(
        model="llama-3b",
        dtype="bfloat16",
        num_blocks=131_072 // PAGE + 1_536,
        max_positions=131_072 + 2048,
    ),
    arena_bytes=20 << 30,
    chunk=2048,
    prefixes=(8_192, 32_768, 131_072),
    restores=3,
    sessions=(1, 8, 32),
    turn=2_048,
)
TINY = Setup(
    spec=EngineSpec(model="llama-tiny", vocab_size=512, num_blocks=32),
    arena_bytes=16 << 20,
    chunk=PAGE,
    prefixes=(2 * PAGE, 8 * PAGE),
    restores=2,
    sessions=(1, 2),
    turn=2 * PAGE,
    steps=2,
    cycles=2,
    lane_pages=2,
)


class Mapped(CudaDevice):
    """A GPU that says when the arena is registered: before that, copies are slower."""

    def map_host(self, data: torch.Tensor, record_bytes: int) -> None:
        """See `Device.map_host`; waits until it is done."""
        super().map_host(data, record_bytes)
        assert self.wait_mapped(data), "the driver refused to register the arena"


@contextmanager
def engine_of(setup: Setup, device: Device) -> Iterator[TransformersEngine]:
    """An engine and the owner of its arena, in this process."""
    with arena_owner(setup.arena_bytes, folder="/dev/shm") as owner:
        engine = TransformersEngine(
            setup.spec,
            LocalPort(owner),
            device=device,
            page_tokens=PAGE,
            limits=CopyLimits(copy_seconds=SECONDS),
            batch=BatchLimits(chunk_tokens=setup.chunk, copy_seconds=SECONDS),
        )
        try:
            yield engine
        finally:
            assert engine.close(SECONDS)


def bare_copy(device: Device, nbytes: int = 1 << 30) -> float:
    """Seconds a byte of one contiguous copy from pinned memory to the device."""
    if device.torch_device.type == "cpu":
        nbytes >>= 5
    source = device.pinned((nbytes,), torch.uint8).fill_(1)
    target = device.empty((nbytes,), torch.uint8)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)  # blocks until the last byte is there
        times.append(time.perf_counter() - start)
    return min(times) / nbytes


def prompt(seed: int, length: int, setup: Setup) -> list[int]:
    """Token ids; those of different seeds differ from the first page on."""
    dice = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, setup.spec.vocab_size, (length,), generator=dice).tolist()
    return tokens
