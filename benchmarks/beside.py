"""What a load costs the matrix products that run beside it, as a ratio to their time alone.

    python -m benchmarks.beside

A load of GLM-5 pages runs the whole time. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import PACKAGES, Lane, Rig, hardware
from benchmarks.report import Row, finish
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.protocols import Direction

PRODUCTS = (  # shape, must, aim
    ((1536, 2816, 8192), 1.10, 1.03),
    ((64, 6144, 6144), 1.15, 1.08),
    ((8192, 8192, 8192), 1.05, 1.02),
)
ROUNDS = 7
ROUND_SECONDS = 0.1


def main() -> int:
    """Measure, print and write."""
    device = CudaDevice()
    rig = Rig(device, (("kv", (73_728,)), ("index", (8_448,))), 78)
    rows = []
    for (m, n, k), must, aim in PRODUCTS:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        count = max(int(ROUND_SECONDS / product_seconds(a, b, 20)), 5)
        ratios = []
        for _ in range(ROUNDS):
            alone = product_seconds(a, b, count)
            with_load = beside(rig, partial(product_seconds, a, b, count))
            ratios.append(with_load / alone)
        rows.append(
            Row(
                name=f"bf16 product {m}x{n}x{k} beside a load, over alone",
                value=statistics.median(ratios),
                unit="x",
                limit=1.0,
                must=must,
                aim=aim,
            )
        )
    rig.close()
    gpu, driver = hardware()
    return finish("beside", rows, PACKAGES, hardware=gpu, driver=driver)


def product_seconds(a: torch.Tensor, b: torch.Tensor, count: int) -> float:
    """Time of one product, over `count` in a row, by the GPU's own clock."""
    before = torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(count):
        torch.matmul(a, b)
    after.record()
    after.synchronize()
    elapsed_ms: float = before.elapsed_time(after)
    return elapsed_ms / 1e3 / count


def beside(rig: Rig, measure: Callable[[], float]) -> float:
    """Measure while another thread loads all the time."""
    loading, done = threading.Event(), threading.Event()

    def load() -> None:
        lane = Lane(rig, Direction.LOAD)
        lane.move()
        while not done.is_set():
            lane.move()
            loading.set()

    thread = threading.Thread(target=load)
    thread.start()
    loading.wait()
    try:
        return measure()
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
