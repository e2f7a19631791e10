"""What Ray's own ways to carry bytes cost between two Ray nodes of one machine.

Behind `docs/adr/0002-what-ray-carries.md`. Both nodes share the machine's cores and memory, so read
the ratios; a plain copy of the same bytes is measured beside them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.report import Row, finish
from rayhicache.actors.local_ray import LocalRay, join
from rayhicache.actors.roster import seats_of_nodes
from rayhicache.config import ClusterConfig

PIECE_BYTES = 4 << 20
PIECES = 32
IN_FLIGHT = 3
CALLS = 300


class Peer:
    """An actor of another node, with bytes to read."""

    def __init__(self) -> None:
        self._piece = bytes(range(256)) * (PIECE_BYTES // 256)

    def take(self, data: bytes) -> int:
        """Take an argument."""
        return len(data)

    def read(self) -> bytes:
        """One piece, as an answer."""
        return self._piece

    def stream(self, count: int) -> Iterator[bytes]:
        """Pieces, as a streaming generator."""
        for _ in range(count):
            yield self._piece


def calls(peer: Any, data: bytes) -> float:
    """Median of one call with this argument, in milliseconds."""
    taken = []
    for _ in range(CALLS):
        start = time.perf_counter()
        ray.get(peer.take.remote(data))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[CALLS // 10 :]) * 1e3


def plain(peer: Any) -> None:
    """Read the pieces by plain calls, a few in flight, as the `ray` transport does."""
    waiting: deque[Any] = deque()
    for _ in range(PIECES):
        waiting.append(peer.read.remote())
        if len(waiting) >= IN_FLIGHT:
            ray.get(waiting.popleft())
    while waiting:
        ray.get(waiting.popleft())


def streamed(peer: Any) -> None:
    """Read the pieces from a streaming generator."""
    for ref in peer.stream.options(num_returns="streaming").remote(PIECES):
        ray.get(ref)


def copied(source: bytes) -> None:
    """Copy as many bytes in memory."""
    target = bytearray(PIECE_BYTES)
    for _ in range(PIECES):
        target[:] = source


def rate(move: Callable[[], None]) -> float:
    """GiB/s of moving all pieces: the median of five times, after one to warm up."""
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        move()
        taken.append(time.perf_counter() - start)
    return PIECES * PIECE_BYTES / (1 << 30) / statistics.median(taken[1:])


def main() -> int:
    """Measure on a local Ray of two nodes; the exit status."""
    local = LocalRay(ClusterConfig(local_nodes=2))
    try:
        join(local.address)
        there = NodeAffinitySchedulingStrategy(node_id=seats_of_nodes()["node1"], soft=False)
        decorate: Any = ray.remote
        peer = decorate(Peer).options(num_cpus=0, scheduling_strategy=there).remote()
        copy = rate(lambda: copied(bytes(PIECE_BYTES)))
        rows = [
            Row(name="empty actor call", value=calls(peer, b""), unit="ms"),
            Row(
                name="call with 1,024 keys in a blob", value=calls(peer, bytes(1 << 14)), unit="ms"
            ),
            Row(
                name="call with an argument of 200 KiB",
                value=calls(peer, bytes(200 << 10)),
                unit="ms",
            ),
            *(
                Row(name=name, value=rate(move), unit="GiB/s", limit=copy, smaller_is_better=False)
                for name, move in (
                    ("4 MiB pieces by plain calls, 3 in flight", lambda: plain(peer)),
                    ("4 MiB pieces by a streaming generator", lambda: streamed(peer)),
                )
            ),
            Row(name="plain copy in memory", value=copy, unit="GiB/s", smaller_is_better=False),
        ]
    finally:
        local.stop()
    return finish("ray_calls", rows, ["ray"])


if __name__ == "__main__":
    sys.exit(main())
