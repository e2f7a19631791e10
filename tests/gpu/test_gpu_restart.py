"""R29 on a GPU: the pool's process dies while copies wait on a stream; none of them goes astray."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from gpu.gpus import SECONDS, SleepyDevice, World
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.core.plan import TransferPlan, plan_pages
from rayhicache.core.slots import Region, SlotRef
from rayhicache.device.copier import Copier, LoadRequest, StoreRequest
from rayhicache.device.limits import CopyLimits
from rayhicache.device.space import HostRegion, TransferSpace
from rayhicache.memory.arena import Arena
from rayhicache.memory.layout_codec import encode_layout
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.process import this_process
from rayhicache.testing import poison

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ARENA_BYTES = 8 << 20
PROGRAM = """
import json, sys
from pathlib import Path
from rayhicache.core.keys import PageKey
from rayhicache.memory.arena import Arena
from rayhicache.memory.layout_codec import decode_layout
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.process import ProcessIdentity, own_pid_namespace, start_time_of

root, layout, pid, size = sys.argv[1:]
owner = ArenaOwner(Arena.create_or_adopt(Path(root), "tier", "seat-0", int(size)))
worker = ProcessIdentity(
    pid=int(pid), start_time=start_time_of(int(pid)), pid_namespace=own_pid_namespace()
)
attachment = owner.attach(decode_layout(bytes.fromhex(layout)), worker)
session = attachment.session
key = PageKey(bytes([1]) * 16)
(fill,) = owner.reserve([key], session).fills
owner.commit([fill.ref], session)
reading = owner.lookup([key], session).lease.refs()
(writing,) = owner.reserve([PageKey(bytes([9]) * 16)], session).fills
(region,) = attachment.regions
print(json.dumps({
    "session": session,
    "path": attachment.path,
    "reading": [list(ref) for ref in reading],
    "writing": [list(writing.ref)],
    "region": [region.first_slot, region.num_slots, region.record_bytes, region.offset],
}), flush=True)
sys.stdin.read()
"""


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(2, "big") * 8)


class HeldStream:
    """A stream of compute that goes on when the host says so: it waits for a word in memory."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ
        address = ctypes.c_uint64(self._word.data_ptr())
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        assert wait(stream, address, ctypes.c_uint32(1), ctypes.c_uint(at_least)) == 0
        # Should the driver wait for the device meanwhile, the test fails and doesn't hang.
        self._limit = threading.Timer(SECONDS, self.release)
        self._limit.daemon = True
        self._limit.start()

    def release(self) -> None:
        """Let the stream go."""
        self._limit.cancel()
        self._word[0] = 1


class Owner:
    """The pool's process. A worker's page 1 is leased, and a slot is being filled for it."""

    def __init__(self, root: Path, layout: RecordLayout) -> None:
        words = (str(root), encode_layout(layout).hex(), str(os.getpid()), str(ARENA_BYTES))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.session: int = told["session"]
        self.path: str = told["path"]
        (self.reading,) = [SlotRef(*ref) for ref in told["reading"]]
        (self.writing,) = [SlotRef(*ref) for ref in told["writing"]]
        first, number, nbytes, offset = told["region"]
        self.region = Region(
            group="full", first_slot=first, num_slots=number, record_bytes=nbytes, offset=offset
        )

    def kill(self) -> None:
        """kill -9, and gone when this returns."""
        self.process.kill()
        self.process.communicate()


class Worker:
    """The world's pools, and copies between them and the owner's arena, mapped and registered."""

    def __init__(self, world: World, owner: Owner) -> None:
        self.world, self.region = world, owner.region
        with open(owner.path, "r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        self.host = torch.frombuffer(
            self._mapped,
            dtype=torch.uint8,
            count=self.region.num_slots * self.region.record_bytes,
            offset=self.region.offset,
        )
        world.device.map_host(self.host, self.region.record_bytes)
        assert world.device.wait_mapped(self.host, SECONDS)
        host = HostRegion(region=self.region, data=self.host)
        self.space = TransferSpace(world.layout, world.memories, {"full": host})
        self.copier = Copier(
            world.device,
            self.space,
            world.pools.gate,
            allocator=world.pools.allocator,
            limits=CopyLimits(wait_seconds=SECONDS, copy_seconds=SECONDS),
        )

    def plan(self, block: int, slot: int) -> TransferPlan:
        names = self.world.pools.pools
        return plan_pages(self.world.layout, "full", [slot], dict.fromkeys(names, (block,)))

    def load(self, block: int, slot: int) -> LoadRequest:
        return LoadRequest(id="load", plan=self.plan(block, slot))

    def store(self, block: int, slot: int) -> StoreRequest:
        owned = dict.fromkeys(self.world.pools.pools, (block,))
        return StoreRequest(id="store", blocks=owned, plan=lambda: self.plan(block, slot))

    def record(self, slot: int) -> dict[tuple[str, int], torch.Tensor]:
        """The parts of a record, by pool and layer: views into the arena."""
        at = slot - self.region.first_slot
        return {
            (pool.name, layer_id): self.space.host_rows(pool.name, layer_id, 0)[at, 0]
            for pool in self.world.layout.pools
            for layer_id in pool.layer_ids
        }

    def fill(self, slot: int, page: PageKey) -> None:
        for (pool, layer_id), part in self.record(slot).items():
            part.copy_(poison.content(page, pool, layer_id, 0, part.numel()))

    def holds(self, slot: int, page: PageKey) -> bool:
        """Whether every part of a record is of that page."""
        return all(
            torch.equal(part, poison.content(page, pool, layer_id, 0, part.numel()))
            for (pool, layer_id), part in self.record(slot).items()
        )

    def block_holds(self, block: int, page: PageKey) -> bool:
        """Whether every layer of every pool has that page in a device block."""
        try:
            poison.check(self.world.memories, {block: page})
        except AssertionError:
            return False
        return True

    def close(self) -> None:
        assert self.copier.close(SECONDS)
        torch.cuda.synchronize()
        self.world.device.unmap_host(self.host)


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(f"/dev/shm/rhc-{secrets.token_hex(4)}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def store_everywhere(owner: ArenaOwner, worker: Worker) -> dict[PageKey, int]:
    """Store more pages than there are slots; where those lie that are left."""
    session = owner.attach(worker.world.layout, this_process("greedy")).session
    pages: Sequence[PageKey] = [key(1000 + n) for n in range(worker.region.num_slots + 2)]
    for page in pages:
        reserved = owner.reserve([page], session)
        assert reserved is not None
        (fill,) = reserved.fills
        worker.fill(fill.ref.slot, page)
        owner.commit([fill.ref], session)
    found = {}
    for page in pages:
        hit = owner.lookup([page], session)
        if hit.lease is not None:
            (ref,) = hit.lease.refs()
            found[page] = ref.slot
            owner.release(hit.lease.id)
    owner.detach(session)
    return found


@pytest.mark.parametrize("named", [True, False])
def test_copies_that_outlive_their_pool_touch_nobody_elses_bytes(root: Path, named: bool) -> None:
    """With the open slots named no record and no device page differs; unnamed, both do."""
    world = World(SleepyDevice())
    process = Owner(root, world.layout)
    worker = Worker(world, process)
    read, written = process.reading.slot, process.writing.slot
    mine, new = key(1), key(2)
    worker.fill(read, mine)
    target, source = world.take(2)
    # Whatever the first copy of a way allocates and compiles is there before the stream is held.
    assert worker.copier.start_loading([worker.load(target, read)]).result(SECONDS) is not None
    assert worker.copier.start_writing([worker.store(target, written)]).result(SECONDS) is not None
    poison.poison(world.memories)
    poison.fill(world.memories, {source: new})
    torch.cuda.synchronize()

    held = HeldStream()
    try:
        with torch.cuda.stream(held.stream):
            world.pools.free([target])  # its fence is behind the held work
            assert world.take(1) == [target]
            load = worker.copier.start_loading([worker.load(target, read)])
            store = worker.copier.start_writing([worker.store(source, written)])
        process.kill()
        owner = ArenaOwner(Arena.create_or_adopt(root, "tier", "seat-0", ARENA_BYTES))
        assert owner.recovering() == (process.session,)
        owner.reattach(
            process.session,
            this_process("worker"),
            reading=[process.reading] if named else [],
            writing=[process.writing] if named else [],
        )
        others = store_everywhere(owner, worker)
        assert load.result(0) is None, "the stream is still held"
        assert store.result(0) is None, "the stream is still held"
    finally:
        held.release()
    for ticket in (load, store):
        outcome = ticket.result(SECONDS)
        assert outcome is not None
        assert outcome.done
    wrong = [page for page, slot in others.items() if not worker.holds(slot, page)]
    assert len(others) == worker.region.num_slots - 2 * named
    assert worker.block_holds(target, mine) is named
    assert bool(wrong) is not named
    assert worker.holds(written, new), "that is where the store went"
    assert worker.block_holds(source, new)
    worker.close()
    owner.close(unlink=True)
    world.close()
