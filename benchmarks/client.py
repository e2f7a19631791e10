"""A restore as a client sees it: look up, lease, load until the last byte is there.

    python -m benchmarks.client

512 GLM-5 pages of 16 layers, and one page; with an owner in the same process, and through Ray's
actor of another process where Ray is installed. The limit is one contiguous copy of as many bytes
in the same run. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import importlib.util
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.gpu import PACKAGES, Link, hardware
from benchmarks.report import Row, finish
from benchmarks.tier import PAGE, Tier, tier_of
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.protocols import Direction
from rayhicache.requests import Prompt

if TYPE_CHECKING:
    from rayhicache.memory.port import Port

LAYERS = 16
PAGES = 512
PAGE_BYTES = LAYERS * (73_728 + 8_448)
RUNS = 15


def main() -> int:
    """Measure, print and write."""
    link = Link()
    seconds_per_byte = link.seconds_per_byte(Direction.LOAD)
    link.close()
    device = CudaDevice()
    rows: list[Row] = []
    with tier_of(device, layers=LAYERS, pages=2 * PAGES, num_blocks=PAGES) as tier:
        rows += rows_of(tier, "owner in the same process", seconds_per_byte)
    if importlib.util.find_spec("ray") is not None:
        with ExitStack() as stack:
            port = stack.enter_context(ray_port())
            tier = stack.enter_context(
                tier_of(device, layers=LAYERS, pages=0, num_blocks=PAGES, port=port)
            )
            rows += rows_of(tier, "owner a Ray actor", seconds_per_byte)
    device.close()
    gpu, driver = hardware()
    return finish("client", rows, PACKAGES, hardware=gpu, driver=driver)


def rows_of(tier: Tier, where: str, seconds_per_byte: float) -> list[Row]:
    """Many pages against the link, and one page in milliseconds."""
    many, one = tier.fill(PAGES, seed=1), tier.fill(1, seed=2)
    whole = PAGES * PAGE_BYTES * seconds_per_byte / seconds(tier, many, PAGES)
    return [
        Row(
            name=f"lookup, lease and load of {PAGES} pages, {where}",
            value=whole,
            unit="of limit",
            limit=1.0,
            must=0.85,
            aim=0.95,
            smaller_is_better=False,
        ),
        Row(
            name=f"the same of one page, {where}",
            value=seconds(tier, one, 1) * 1e3,
            unit="ms",
            limit=PAGE_BYTES * seconds_per_byte * 1e3,
            must=1.5,
            aim=0.8,
        ),
    ]


def seconds(tier: Tier, prompt: Prompt, pages: int) -> float:
    """Median time of a restore."""
    blocks = tier.take(pages)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        tier.restore(prompt, blocks)
        times.append(time.perf_counter() - start)
    tier.pools.free(blocks)
    return statistics.median(times)


@contextmanager
def ray_port() -> Iterator[Port]:
    """A port to the pool of a cluster of one node, launched for the benchmark."""
    import rayhicache as hc
    from rayhicache.actors.link import RayPort

    config = hc.ClusterConfig(
        name=f"bench-{secrets.token_hex(3)}",
        workers_per_node=0,
        arena_bytes=3 * PAGES * PAGE_BYTES,
        page_tokens=PAGE,
        device="cpu",
    )
    with hc.launch(config) as cluster:
        port = RayPort(
            cluster.config.name, "node0", client="bench", call_seconds=10.0, pull_seconds=10.0
        )
        yield port


if __name__ == "__main__":
    sys.exit(main())
