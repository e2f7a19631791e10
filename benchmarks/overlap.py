"""How a load hides behind a forward, and what it costs the engine's thread.

    python -m benchmarks.overlap

GLM-5's shapes: 78 layers, 73,728 + 8,448 bytes a page and layer. The owner of the arena is in the
same process, so no time is an actor call's. Needs an NVIDIA GPU, 40 GiB of it, 20 GiB of
/dev/shm and 100 GiB of memory.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import PACKAGES, hardware
from benchmarks.report import Row, finish
from benchmarks.tier import PAGE, SECONDS, CountingPort, Tier, tier_of
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.ticket import Ticket, TicketState
from rayhicache.requests import Load, Prompt

LAYERS = 78
PAGES = 512
REQUESTS = 4
LONG_PAGES = 2_000  # 128k tokens
PRODUCT = (1536, 2816, 8192)
STEPS = 10_000
STEPS_A_TURN = 500
REGISTERED = 64 << 30


def main() -> int:
    """Measure, print and write."""
    device = CudaDevice()
    rows: list[Row] = []
    with tier_of(
        device, layers=LAYERS, pages=LONG_PAGES + PAGES, num_blocks=LONG_PAGES + PAGES
    ) as tier:
        prompts = [tier.fill(PAGES // REQUESTS, seed) for seed in range(REQUESTS)]
        rows.append(forward_row(tier, prompts))
        rows += long_rows(tier, tier.fill(LONG_PAGES, seed=99))
        rows += step_rows(tier)
    rows += registering_rows(device)
    gpu, driver = hardware()
    return finish("overlap", rows, PACKAGES, hardware=gpu, driver=driver)


class Forward:
    """Products spread over the layers, as much compute in all as was asked for."""

    def __init__(self, seconds: float) -> None:
        m, n, k = PRODUCT
        self._a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self._b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self._products = 800
        self.run(lambda layer_id: None)
        self._products = round(self._products * seconds / self.run(lambda layer_id: None))

    def run(self, before: Callable[[int], object]) -> float:
        """Seconds of all layers, each after `before(layer)`."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        done = 0
        for layer_id in range(LAYERS):
            before(layer_id)
            upto = self._products * (layer_id + 1) // LAYERS
            for _ in range(upto - done):
                torch.mm(self._a, self._b, out=self._out)
            done = upto
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - start


def forward_row(tier: Tier, prompts: list[Prompt]) -> Row:
    """A forward whose compute equals its copy, with a batch's loads under way."""
    blocks = [tier.take(PAGES // REQUESTS) for _ in prompts]
    every = [block for mine in blocks for block in mine]

    def load() -> tuple[float, Callable[[], float]]:
        found = [tier.client.lookup(prompt) for prompt in prompts]
        requests = [
            Load(id=str(at), found=one, blocks=mine)
            for at, (one, mine) in enumerate(zip(found, blocks, strict=True))
        ]
        start = time.perf_counter()
        ticket = tier.client.load(requests)

        def wait() -> float:
            assert ticket.result(SECONDS)
            return time.perf_counter() - start

        return start, wait

    def read(layer_id: int) -> None:
        tier.pool.get_key_buffer(layer_id)
        tier.pool.get_index_k_with_scale_buffer(layer_id)

    copies = [load()[1]() for _ in range(5)]
    copy = statistics.median(copies)
    forward = Forward(copy)
    whole, beside = [], []
    for _ in range(7):
        start, wait = load()
        with tier.pools.reading(every):
            forward.run(read)
        whole.append(time.perf_counter() - start)
        wait()
        _, wait = load()
        beside.append(forward.run(lambda layer_id: None))
        wait()
    for mine in blocks:
        tier.pools.free(mine)
    return Row(
        name=f"forward of {LAYERS} layers under its load, over max(copy, compute beside a copy)",
        value=statistics.median(whole) / max(copy, statistics.median(beside)),
        unit="x",
        limit=1.0,
        must=1.15,
        aim=1.05,
    )


def long_rows(tier: Tier, prompt: Prompt) -> list[Row]:
    """Time to the first layer of a 128k-token prefix; what its load costs the host's threads."""
    blocks = tier.take(LONG_PAGES)
    nbytes = LONG_PAGES * (73_728 + 8_448)
    first, engine, whole = [], [], []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = tier.client.lookup(prompt)
        assert found.tokens == LONG_PAGES * PAGE
        asked = time.perf_counter()
        ticket = tier.client.load([Load(id="a", found=found, blocks=blocks)])
        engine.append(time.perf_counter() - asked)
        with tier.pools.reading(blocks):
            tier.pool.get_key_buffer(0)
            tier.pool.get_index_k_with_scale_buffer(0)
        torch.cuda.current_stream().synchronize()
        first.append(time.perf_counter() - start)
        assert ticket.result(SECONDS)
        whole.append(time.perf_counter() - start)
    layer = statistics.median(whole) / LAYERS
    held = gil_seconds(tier, prompt, blocks)
    tier.pools.free(blocks)
    return [
        Row(
            name=f"first layer of {LONG_PAGES * PAGE:,} tokens ({nbytes / 1e6:.0f} MB), from "
            "lookup(), over its own copy",
            value=(statistics.median(first) - layer) * 1e3,
            unit="ms more",
            must=3.0,
            aim=1.0,
        ),
        Row(
            name=f"engine's thread, load() of {LONG_PAGES:,} pages, 2 pools",
            value=statistics.median(engine) * 1e3,
            unit="ms",
            must=0.5,
            aim=0.1,
        ),
        Row(
            name="GIL held by the copy threads for the same, with its switches",
            value=held * 1e3,
            unit="ms",
            must=5.0,
            aim=0.5,
        ),
    ]


def gil_seconds(tier: Tier, prompt: Prompt, blocks: list[int]) -> float:
    """What a thread that never lets the GIL go by itself loses to one load's threads.

    They get it at the interpreter's switch interval, here a short one; what this thread counts
    less than it would alone is what they had, with the switches.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        rate = _count(lambda elapsed: elapsed < 0.5)
        found = []
        for _ in range(5):
            one = tier.client.lookup(prompt)
            ticket = tier.client.load([Load(id="a", found=one, blocks=blocks)])
            start = time.perf_counter()
            counted = _count(partial(_is_open, ticket), per_second=False)
            found.append(time.perf_counter() - start - counted / rate)
            assert ticket.result(SECONDS)
        return statistics.median(found)
    finally:
        sys.setswitchinterval(interval)


def _is_open(ticket: Ticket, elapsed: float) -> bool:
    return ticket.state is TicketState.OPEN and elapsed < SECONDS


def _count(go_on: Callable[[float], bool], *, per_second: bool = True) -> float:
    """Turns of a loop while `go_on(elapsed)`; of each second, or in all."""
    start = time.perf_counter()
    turns = 0
    while go_on(time.perf_counter() - start):
        turns += 1
    return turns / (time.perf_counter() - start) if per_second else turns


def step_rows(tier: Tier) -> list[Row]:
    """A decode step of many layers with nothing to load, over the same one without a tier."""
    blocks = tier.take(32)
    a = torch.randn(64, 6144, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(6144, 6144, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 6144, device="cuda", dtype=torch.bfloat16)
    with tier.pools.reading(blocks):
        kept = [
            (tier.pool.get_key_buffer(i), tier.pool.get_index_k_with_scale_buffer(i))
            for i in range(LAYERS)
        ]

    def bare() -> None:
        for layer_id in range(LAYERS):
            _ = kept[layer_id]
            torch.mm(a, b, out=out)

    def attached() -> None:
        with tier.pools.reading(blocks, writes=blocks):
            for layer_id in range(LAYERS):
                tier.pool.get_key_buffer(layer_id)
                tier.pool.get_index_k_with_scale_buffer(layer_id)
                torch.mm(a, b, out=out)

    times: dict[str, list[float]] = {"bare": [], "attached": []}
    calls = CountingPort.calls
    for _ in range(STEPS // STEPS_A_TURN):
        for name, step in (("bare", bare), ("attached", attached)):
            for _ in range(STEPS_A_TURN):
                start = time.perf_counter()
                step()
                torch.cuda.current_stream().synchronize()
                times[name].append(time.perf_counter() - start)
    tier.pools.free(blocks)
    found = {name: sorted(mine) for name, mine in times.items()}
    return [
        *(
            Row(
                name=f"step of {LAYERS} layers, tier attached, nothing to load, {name} over none",
                value=found["attached"][at] / found["bare"][at],
                unit="x",
                limit=1.0,
                must=must,
                aim=aim,
            )
            for name, at, must, aim in (
                ("p50", STEPS // 2, 1.005, 1.002),
                ("p99", STEPS * 99 // 100, 1.02, 1.01),
            )
        ),
        Row(
            name=f"calls to the owner in {STEPS:,} such steps",
            value=float(CountingPort.calls - calls),
            unit="calls",
            must=0.0,
            aim=0.0,
        ),
    ]


def registering_rows(device: CudaDevice) -> list[Row]:
    """Launch and synchronise again and again while host memory is being registered."""
    tiny = torch.zeros(64, device="cuda")
    stream = torch.cuda.current_stream()
    host = _resident(REGISTERED)
    times = []
    begun = time.perf_counter()
    device.map_host(host, 16 << 20)
    while not device.wait_mapped(host, 0):
        assert time.perf_counter() - begun < SECONDS, "the memory wasn't registered"
        for _ in range(50):
            start = time.perf_counter()
            tiny.add_(1)
            stream.synchronize()
            times.append(time.perf_counter() - start)
    took = time.perf_counter() - begun
    device.unmap_host(host)
    times.sort()
    return [
        Row(
            name="launch + sync while 64 GiB are registered, p99",
            value=times[len(times) * 99 // 100] * 1e3,
            unit="ms",
            must=0.1,
            aim=0.05,
        ),
        Row(
            name="launch + sync while 64 GiB are registered, the longest",
            value=times[-1] * 1e3,
            unit="ms",
            must=10.0,
            aim=3.0,
        ),
        Row(name="registering 64 GiB in the background", value=took, unit="s"),
    ]


def _resident(nbytes: int) -> torch.Tensor:
    """Shared memory that is resident but not yet mapped page by page, as a worker finds an arena.

    Not a file of /dev/shm, which may be smaller.
    """
    fd = os.memfd_create("rhc-bench")
    try:
        os.truncate(fd, nbytes)
        torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8).fill_(1)
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
