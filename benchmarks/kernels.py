"""What the kernels cost or bring: digests over the copies, index readers over a device's own copy.

    python -m benchmarks.kernels

All in one run: digests of 512 GLM-5 pages against the store and the load of the same pages, index
entries gathered against a plain copy of as many bytes on the device, and the Triton copy against
one contiguous copy over the link. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import PACKAGES, PAGES, Link, Rig, hardware
from benchmarks.report import Row, finish
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.driver import driver
from rayhicache.device.cuda.geometry import geometry_of
from rayhicache.device.cuda.movers import Moving
from rayhicache.device.cuda.triton_copy import TritonMover, triton_copy
from rayhicache.device.cuda.words import WordBoard
from rayhicache.device.paged import PagedGather, Section, gather_with_torch
from rayhicache.device.protocols import Direction
from rayhicache.device.staging import StagedPlan, Staging

GLM_5 = (("kv", (73_728,)), ("index", (8_448,)))
LAYERS = 78
ENTRIES, KEY_BYTES, SCALE_BYTES = 64, 128, 4
INDEX_BLOCKS = 16_384
BATCHES = (  # sequences, entries of each
    (1, 131_072),
    (8, 131_072),
    (64, 16_384),
    (256, 1_000),
)
TRITON_BLOCKS = 32
RUNS = 9


def main() -> int:
    """Measure, print and write."""
    device = CudaDevice()
    rig = Rig(device, GLM_5, LAYERS)
    rows = digest_rows(rig) + triton_rows(rig)
    rig.close()
    rows += gather_rows(device)
    gpu, version = hardware()
    return finish("kernels", rows, PACKAGES, hardware=gpu, driver=version)


def median_seconds(run: Callable[[], object]) -> float:
    """Of one run, from the call until the GPU has done it; the first is left out."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def kernel_seconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Of one run on the current stream, by the GPU's own clock, launches back to back."""
    run()
    times: list[float] = []
    for _ in range(RUNS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / rounds)
    return statistics.median(times)


def stage(staging: Staging, rig: Rig, way: Direction) -> StagedPlan:
    """A plan of all pages, permuted."""
    staged = staging.move_hybrid_indices([rig.plan()], way)
    assert staged is not None
    return staged


def digest_rows(rig: Rig) -> list[Row]:
    """Digests alone, each way's share, and a store with them beside its copies."""
    copied = {way: rig.seconds(way, runs=RUNS) for way in Direction}
    stream = rig.device.new_stream("store")
    staging = Staging(rig.device, rig.space, stream)
    staged = stage(staging, rig, Direction.STORE)
    alone = median_seconds(lambda: rig.device.digests(staged, stream))
    staging.retire(staged)
    plan = rig.plan()

    def both() -> None:
        """As a store of the copier: digests first, waited for at the end."""
        staged = staging.move_hybrid_indices([plan], Direction.STORE)
        assert staged is not None
        digests = rig.device.digests(staged, stream)
        for _ in rig.device.copy(staged, stream):
            pass
        stream.wait(digests.event)
        stream.stream.synchronize()
        staging.retire(staged)

    pages = f"{PAGES} GLM-5 pages, {LAYERS} layers"
    rows = [
        Row(
            name=f"digests of {pages}, over their {way.value}",
            value=alone / copied[way],
            unit="of copy",
            must=0.05,
            aim=0.02,
        )
        for way in Direction
    ]
    return [
        *rows,
        Row(
            name=f"store of {pages} with digests, over without",
            value=median_seconds(both) / copied[Direction.STORE],
            unit="x",
            limit=1.0,
            must=1.05,
            aim=1.02,
        ),
        Row(
            name="digests, bytes read a second",
            value=1e-9 * rig.nbytes / alone,
            unit="GB/s",
            limit=1e-9 * device_copy_rate(),
            smaller_is_better=False,
        ),
    ]


def device_copy_rate(nbytes: int = 2 << 30) -> float:
    """Bytes a second that a copy on the device reads and writes, both counted."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * nbytes / kernel_seconds(lambda: target.copy_(source), rounds=4)


def gather_rows(device: CudaDevice) -> list[Row]:
    """Keys and scales of ragged batches, over a copy of the same bytes on the device."""
    nbytes = ENTRIES * (KEY_BYTES + SCALE_BYTES)
    blocks = torch.randint(0, 256, (INDEX_BLOCKS, nbytes), dtype=torch.uint8, device="cuda")
    rows = []
    for batch, length in BATCHES:
        columns = -(-length // ENTRIES)
        total = batch * length
        gather = PagedGather(
            blocks=blocks,
            entries=ENTRIES,
            sections=(
                Section(offset=0, entry_bytes=KEY_BYTES),
                Section(offset=ENTRIES * KEY_BYTES, entry_bytes=SCALE_BYTES),
            ),
            tables=torch.randint(INDEX_BLOCKS, (batch, columns), dtype=torch.int32, device="cuda"),
            lengths=torch.full((batch,), length, dtype=torch.int32, device="cuda"),
            total=total,
            longest=length,
        )
        source = torch.empty(total * (KEY_BYTES + SCALE_BYTES), dtype=torch.uint8, device="cuda")
        copied = kernel_seconds(source.clone)
        for name, run in (("kernel", device.gather), ("torch", gather_with_torch)):
            spent = kernel_seconds(partial(run, gather))
            rows.append(
                Row(
                    name=f"index gather by {name}, {batch} x {length} entries, of a copy's rate",
                    value=copied / spent,
                    unit="of limit",
                    limit=1.0,
                    smaller_is_better=False,
                )
            )
    return rows


def triton_rows(rig: Rig) -> list[Row]:
    """All GLM-5 pages by the Triton kernel alone, layer by layer."""
    copy = triton_copy(0)
    if copy is None:
        return []
    link = Link()
    limits = {way: link.seconds_per_byte(way) for way in Direction}
    link.close()
    board = WordBoard()
    rows = []
    for way in Direction:
        staging = Staging(rig.device, rig.space, rig.device.new_stream("triton"))
        staged = stage(staging, rig, way)
        movers = []
        for transfer in staged.transfers:
            place = geometry_of(rig.space, transfer.pool)
            moving = Moving(
                transfer=transfer,
                place=place,
                load=way is Direction.LOAD,
                start=0,
                stop=transfer.count,
                host_layers=tuple(
                    torch.tensor(side.host_layers, device="cuda") for side in place.sides
                ),
            )
            stream, word = torch.cuda.Stream(), board.new_word()
            movers.append(TritonMover(copy, driver(), stream, word, moving, blocks=TRITON_BLOCKS))
        torch.cuda.synchronize()

        def move(movers: list[TritonMover] = movers) -> None:
            for position in range(LAYERS):
                for mover in movers:
                    mover.enqueue(position)

        rows.append(
            Row(
                name=f"{way.value} of GLM-5 pages by Triton, {TRITON_BLOCKS} blocks",
                value=limits[way] * rig.nbytes / median_seconds(move),
                unit="of limit",
                limit=1.0,
                smaller_is_better=False,
            )
        )
        staging.retire(staged)
    return rows


if __name__ == "__main__":
    sys.exit(main())
