"""What a load costs the work that runs beside it, as a ratio to the work's time alone.

    python -m benchmarks.beside

Loads of GLM-5 pages run the whole time, from a second thread of the same process. Each time beside
them stands between two alone, so a GPU that warms up favours neither. Products are replayed from a
CUDA graph, as engines decode; a small one is launched one by one as well, and so is a host loop of
tiny kernels, whose limit is what contiguous copies beside it cost. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.gpu import PACKAGES, Lane, Link, Rig, hardware
from benchmarks.report import Row, finish
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.stream import CudaEvent
from rayhicache.device.protocols import Direction

PRODUCTS = (  # shape, must, aim
    ((1536, 2816, 8192), 1.10, 1.03),
    ((64, 6144, 6144), 1.15, 1.08),
    ((8192, 8192, 8192), 1.05, 1.02),
)
SMALL = (64, 6144, 6144)
ROUNDS = 7
ROUND_SECONDS = 0.1
LAUNCHES = 78 * 10
LOOPS = 100


def main() -> int:
    """Measure, print and write."""
    device = CudaDevice()
    rig = Rig(device, (("kv", (73_728,)), ("index", (8_448,))), 78)
    rows = []
    for shape, must, aim in PRODUCTS:
        name = "x".join(map(str, shape))
        graph = Product(*shape)
        rows.append(
            Row(
                name=f"bf16 product {name} beside a load, over alone",
                value=ratio(rig, graph.replayed),
                unit="x",
                limit=1.0,
                must=must,
                aim=aim,
            )
        )
        if shape == SMALL:
            rows.append(
                Row(
                    name=f"the same, {name}, launched one by one from Python",
                    value=ratio(rig, graph.launched),
                    unit="x",
                    limit=1.0,
                    must=must,
                    aim=aim,
                )
            )
    rows += launch_rows(rig)
    rig.close()
    gpu, driver = hardware()
    return finish("beside", rows, PACKAGES, hardware=gpu, driver=driver)


class Product:
    """A matrix product, many times in a row."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self._a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self._b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self._count = 20
        self._count = max(int(ROUND_SECONDS / self.launched()), 5)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(self._count):
                torch.mm(self._a, self._b, out=self._out)

    def replayed(self) -> float:
        """Seconds of one product, by the GPU's own clock."""
        return self._timed(self._graph.replay)

    def launched(self) -> float:
        """The same, each launched by itself."""

        def run() -> None:
            for _ in range(self._count):
                torch.mm(self._a, self._b, out=self._out)

        return self._timed(run)

    def _timed(self, run: Callable[[], None]) -> float:
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        after.synchronize()
        elapsed_ms: float = before.elapsed_time(after)
        return elapsed_ms / 1e3 / self._count


def ratio(rig: Rig, measure: Callable[[], float]) -> float:
    """Beside loads over alone, the median of some rounds."""
    measure()
    found = []
    for _ in range(ROUNDS):
        before = measure()
        with loading(rig):
            beside = measure()
        found.append(2 * beside / (before + measure()))
    return statistics.median(found)


def launch_rows(rig: Rig) -> list[Row]:
    """How much longer a host loop of launches takes beside loads, and beside contiguous copies."""
    tiny = torch.zeros(64, device="cuda")

    def loops() -> list[float]:
        times = []
        for _ in range(LOOPS):
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                tiny.add_(1)
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        return sorted(times)

    loops()
    alone = loops()
    with loading(rig):
        beside = loops()
    link = Link()
    with repeating(partial(link.copy, Direction.LOAD)):
        bound = loops()
    link.close()
    alone = [(a + b) / 2 for a, b in zip(alone, loops(), strict=True)]
    return [
        Row(
            name=f"host loop of {LAUNCHES} launches beside loads, {name} over alone",
            value=beside[at] / alone[at],
            unit="x",
            limit=bound[at] / alone[at],
            must=1.10 if name == "p99" else None,
            aim=1.02 if name == "p99" else None,
        )
        for name, at in (("p50", LOOPS // 2), ("p99", LOOPS * 99 // 100))
    ]


@contextmanager
def loading(rig: Rig) -> Iterator[None]:
    """Loads of all pages, one after the other, in another thread."""
    lane = Lane(rig, Direction.LOAD)

    def load() -> None:
        # As the copier's finisher waits: asking now and then.
        staged, event = lane.enqueue(), CudaEvent()
        lane.stream.record(event)
        event.synchronize(None)
        lane.retire(staged)

    with repeating(load):
        yield


@contextmanager
def repeating(work: Callable[[], None]) -> Iterator[None]:
    """Do something again and again in another thread; it has been done once before."""
    begun, done = threading.Event(), threading.Event()

    def run() -> None:
        while not done.is_set():
            work()
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
