"""How fast GPUs restore replicated pages together, over the speed of one link.

    python -m benchmarks.peer

One process a GPU. Each restores the same GLM-5 pages (73,728 + 8,448 B, 78 layers): first every
rank all of them at once, then together, each its share, then together beside a real all-reduce.
The limit is one contiguous copy over one GPU's link, alone, in the same run. Needs two or more
NVIDIA GPUs of one host.
"""

from __future__ import annotations

import multiprocessing
import secrets
import shutil
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.gpu import PACKAGES, Link, Rig, hardware
from benchmarks.report import Row, finish
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.peers import CudaPeers
from rayhicache.device.peers import PeerDevice, PeerSeat
from rayhicache.device.protocols import Direction
from rayhicache.device.staging import Staging

POOLS, LAYERS, RUNS = (("kv", (73_728,)), ("index", (8_448,))), 78, 9
REDUCED = 32 << 20  # elements of bf16


class Ranked:
    """One rank: its pools and a lane of loads."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        torch.cuda.set_device(rank)
        torch.manual_seed(0)  # every rank restores the same pages
        inner = CudaDevice(rank)
        seat = PeerSeat(folder=folder / "group", rank=rank, num_ranks=num_ranks)
        self.device = PeerDevice(inner, CudaPeers(inner), seat)
        self.rig = Rig(inner, POOLS, LAYERS)
        self.stream = self.device.new_stream("bench")
        self.plan = self.rig.plan()
        self.staging = Staging(self.device, self.rig.space, self.stream)
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
        )
        self.reduced = torch.zeros(REDUCED, dtype=torch.bfloat16, device=inner.torch_device)

    def connect(self) -> bool:
        """From now on together."""
        return self.device.connect(self.rig.space.pools)

    def restore(self) -> float:
        """Seconds of one restore, from its plan until the last byte is there."""
        start = time.perf_counter()
        staged = self.staging.move_hybrid_indices([self.plan], Direction.LOAD)
        assert staged is not None
        for _ in self.device.copy(staged, self.stream):
            pass
        done = self.device.new_event()
        self.stream.record(done)
        assert done.synchronize(60.0)
        spent = time.perf_counter() - start
        self.staging.retire(staged)
        return spent

    def rate(self) -> float:
        """Restored GB/s of this GPU, the median; all ranks begin at once."""
        times = []
        for _ in range(RUNS + 1):
            torch.distributed.barrier()
            torch.cuda.synchronize()
            times.append(self.restore())
        return 1e-9 * self.rig.nbytes / statistics.median(times[1:])

    def reduce(self, rounds: int = 20) -> float:
        """Seconds of an all-reduce."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            torch.distributed.all_reduce(self.reduced)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / rounds


def serve(pipe: Connection, folder: Path, rank: int, num_ranks: int) -> None:
    """One rank's process."""
    link = 0.0
    if rank == 0:
        torch.cuda.set_device(0)
        measured = Link()
        link = 1e-9 / measured.seconds_per_byte(Direction.LOAD)
        measured.close()
    ranked = Ranked(folder, rank, num_ranks)
    alone = ranked.rate()
    assert ranked.connect(), ranked.device.group.apart
    together = ranked.rate()
    ranked.reduce()
    quiet = ranked.reduce()
    torch.distributed.barrier()
    # As many on every rank, and no barrier: it would be one more collective.
    busy: list[float] = []
    reducing = threading.Thread(target=lambda: busy.append(ranked.reduce(rounds=200)))
    torch.cuda.synchronize()
    reducing.start()
    beside = statistics.median(ranked.restore() for _ in range(RUNS))
    reducing.join()
    pipe.send((link, alone, together, 1e-9 * ranked.rig.nbytes / beside, busy[0] / quiet))
    torch.distributed.barrier()
    torch.cuda.synchronize()
    ranked.device.group.close()
    ranked.rig.close()
    torch.distributed.destroy_process_group()


def main() -> int:
    """Measure, print and write."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        print(f"benchmarks.peer needs two or more NVIDIA GPUs of one host; {count} found")
        return 2
    folder = Path(f"/dev/shm/rhc-peer-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o700)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, folder, rank, count))
            process.start()
            theirs.close()  # so that a rank that fails is told at once
            pipes.append(mine)
            processes.append(process)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join(60.0)
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder)
    link = found[0][0]
    alone, together, beside = (min(each[at] for each in found) for at in (1, 2, 3))
    rows = [
        Row(name="limit, one contiguous copy", value=link, unit="GB/s", smaller_is_better=False),
        Row(name="each loads all", value=alone / link, unit="x link", smaller_is_better=False),
        Row(
            name=f"together, {count} GPUs, slowest",
            value=together / link,
            unit="x link",
            limit=float(count),
            must=0.8 * count,
            aim=0.925 * count,
            smaller_is_better=False,
        ),
        Row(
            name="together beside an all-reduce, slowest",
            value=beside / link,
            unit="x link",
            limit=float(count),
            smaller_is_better=False,
        ),
        Row(
            name="all-reduce of 64 MiB beside it, over alone",
            value=max(each[4] for each in found),
            unit="x",
        ),
    ]
    gpu, driver = hardware()
    return finish("peer", rows, PACKAGES, hardware=f"{count} x {gpu}", driver=driver)


if __name__ == "__main__":
    sys.exit(main())
