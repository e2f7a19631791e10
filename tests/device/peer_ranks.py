"""Words for tests of ranks that move pages together: one rank, and groups of them."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from device import worlds
from rayhicache.core.layout import ComponentSpec, PoolSpec
from rayhicache.core.plan import plan_pages
from rayhicache.core.slots import divide_regions
from rayhicache.device.copier import Copier, LoadRequest, StoreRequest
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.cpu_peers import CpuPeers
from rayhicache.device.cpu_stream import CpuStream
from rayhicache.device.gate import Gate
from rayhicache.device.limits import CopyLimits
from rayhicache.device.peer_group import PeerBackend
from rayhicache.device.peers import PeerDevice, PeerLimits, PeerSeat
from rayhicache.device.protocols import Direction
from rayhicache.device.space import HostRegion, TransferSpace
from rayhicache.device.ticket import Outcome, Ticket
from rayhicache.pools.base import PoolSet
from rayhicache.testing import poison
from rayhicache.testing.faults import DeviceDecorator

SECONDS = worlds.SECONDS
SLOTS, PAGE, BLOCK = 12, worlds.PAGE, worlds.BLOCK
PER_PAGE = PAGE // BLOCK
LIMITS = PeerLimits(
    connect_seconds=SECONDS,
    begin_seconds=SECONDS,
    push_seconds=SECONDS,
    fence_seconds=SECONDS,
    indices_max=1 << 10,
)


class Rank:
    """One rank: its pools, its copier and its view of the arena that all share."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        *,
        inner: Any = None,
        backend: PeerBackend | None = None,
        limits: PeerLimits = LIMITS,
        sharded: bool = False,
        connect: bool = True,
        **other: Any,
    ) -> None:
        self.rank = rank
        self.inner = inner or CpuDevice(wait_seconds=SECONDS)
        seat = PeerSeat(folder=folder / "group", rank=rank, num_ranks=num_ranks)
        self.device = PeerDevice(
            self.inner,
            backend or CpuPeers(folder / "memory", wait_seconds=SECONDS),
            seat,
            limits=limits,
            **other,
        )
        gate = Gate()
        num_blocks = SLOTS * PER_PAGE
        rows: Any = worlds.mha if sharded else worlds.mla
        self.pools = PoolSet(
            self.device,
            gate,
            [make(self.device, gate, num_blocks=num_blocks) for make in (rows, worlds.index)],
        )
        self.memories = self.pools.memories()
        self.layout = self.pools.layout(PAGE, num_ranks=num_ranks)
        (region,) = divide_regions(
            self.layout, data_offset=0, data_bytes=SLOTS * self.layout.shape().nbytes
        )
        self.host = _file(folder / "arena", SLOTS * self.layout.shape().nbytes)
        regions = {"full": HostRegion(region=region, data=self.host)}
        self.space = TransferSpace(self.layout, self.memories, regions, rank=rank)
        self.copier = Copier(
            self.device,
            self.space,
            gate,
            allocator=self.pools.allocator,
            limits=CopyLimits(wait_seconds=SECONDS),
        )
        poison.poison(self.memories)
        if connect:
            self.connect()

    def connect(self) -> bool:
        return self.device.connect(self.memories)

    def take(self, pages: int, *, seed: int = 0) -> list[int]:
        """Blocks of so many pages, in an order that differs from rank to rank."""
        blocks = self.pools.allocate(pages * PER_PAGE)
        assert blocks is not None
        order = torch.randperm(
            len(blocks), generator=torch.Generator().manual_seed(100 * self.rank + seed)
        )
        return [blocks[at] for at in order.tolist()]

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        plan = plan_pages(self.layout, "full", slots, dict.fromkeys(self.pools.pools, blocks))
        return self.copier.start_loading([LoadRequest(id="a", plan=plan)])

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        plan = plan_pages(self.layout, "full", slots, dict.fromkeys(self.pools.pools, blocks))
        owned = dict.fromkeys(self.pools.pools, tuple(blocks))
        return self.copier.start_writing([StoreRequest(id="a", blocks=owned, plan=lambda: plan)])

    def fill_records(self, slots: Sequence[int]) -> None:
        for spec in self.layout.pools:
            for layer_id, (part, component) in self._fragments(spec):
                rows = self.space.host_rows(spec.name, layer_id, part)
                for slot in slots:
                    for at, key in enumerate(keys_of([slot])):
                        rows[slot, at] = poison.content(
                            key, spec.name, layer_id, part, component.block_bytes
                        )

    def expect(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        poison.check(self.memories, dict(zip(blocks, keys_of(slots), strict=True)))

    def fill_blocks(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        poison.fill(self.memories, dict(zip(blocks, keys_of(slots), strict=True)))

    def expect_records(self, slots: Sequence[int]) -> None:
        for spec in self.layout.pools:
            for layer_id, (part, component) in self._fragments(spec):
                rows = self.space.host_rows(spec.name, layer_id, part)
                for slot in slots:
                    for at, key in enumerate(keys_of([slot])):
                        content = poison.content(
                            key, spec.name, layer_id, part, component.block_bytes
                        )
                        assert torch.equal(rows[slot, at], content), (spec.name, layer_id, slot)

    def _fragments(self, spec: PoolSpec) -> Iterator[tuple[int, tuple[int, ComponentSpec]]]:
        return itertools.product(spec.layer_ids, enumerate(spec.components))

    def restore(self, slots: Sequence[int], *, seed: int = 0) -> str:
        """Load into fresh blocks and check every byte; why this rank goes by itself, if it does."""
        blocks = self.take(len(slots), seed=seed)
        outcome = self.load(blocks, slots).result(SECONDS)
        assert outcome is not None, "the ticket stayed open"
        assert outcome.done, outcome.cause
        self.expect(blocks, slots)
        self.pools.free(blocks)
        return self.device.group.apart

    def stream(self, direction: Direction) -> CpuStream:
        """The lane's own."""
        return _cpu(self.copier._lanes[direction].stream)

    def side(self, direction: Direction = Direction.LOAD) -> CpuStream:
        """The one that passes layers on."""
        return _cpu(self.device._lanes[direction]._side)

    def close(self) -> None:
        core = self.inner.inner if isinstance(self.inner, DeviceDecorator) else self.inner
        for stream in core._streams:
            stream.resume()
        assert self.copier.close(SECONDS)
        self.device.close()
        assert self.pools.allocator.num_held() == 0
        self.pools.allocator.check()


def _cpu(stream: Any) -> CpuStream:
    inner = getattr(stream, "inner", stream)
    assert isinstance(inner, CpuStream)
    return inner


def keys_of(slots: Sequence[int]) -> list[bytes]:
    return [bytes([slot, at]) for slot in slots for at in range(PER_PAGE)]


def outcome_of(ticket: Ticket) -> Outcome:
    outcome = ticket.result(SECONDS)
    assert outcome is not None, "the ticket stayed open"
    return outcome


def _file(path: Path, nbytes: int) -> torch.Tensor:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    folder = Path(f"/dev/shm/rhc-peers-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls at the same time, and give what they return or raise."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


@contextlib.contextmanager
def group_of(
    num_ranks: int, make: Callable[[Path, int, int], Rank] | None = None, *, connected: bool = True
) -> Iterator[list[Rank]]:
    """Connected ranks in this process, each with threads of its own."""

    def plain(folder: Path, rank: int, num: int) -> Rank:
        return Rank(folder, rank, num, connect=False)

    with shared_folder() as folder:
        ranks = [(make or plain)(folder, rank, num_ranks) for rank in range(num_ranks)]
        ranks[0].fill_records(range(SLOTS))
        found = together([rank.connect for rank in ranks])
        assert not any(isinstance(each, BaseException) for each in found), found
        assert all(each is (connected and num_ranks > 1) for each in found), found
        yield ranks
        for rank in ranks:
            for stream in (rank.stream(way) for way in Direction):
                stream.resume()
        for failed in together([rank.close for rank in ranks]):
            assert failed is None, failed


def restored(ranks: Sequence[Rank], slots: Sequence[int], *, seed: int = 0) -> list[str]:
    """Let all restore the same slots at once, and check; why each goes by itself, if it does."""

    def restore(rank: Rank) -> Callable[[], str]:
        return lambda: rank.restore(slots, seed=seed)

    found = together([restore(rank) for rank in ranks])
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


class Process:
    """A rank in a process of its own; `call` runs one of its methods there."""

    def __init__(
        self, folder: Path, rank: int, num_ranks: int, make: type[Rank] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, make or ServedRank, folder, rank, num_ranks), daemon=True
        )
        self.process.start()
        theirs.close()

    def begin(self, name: str, *args: Any) -> None:
        self._pipe.send((name, args))

    def answer(self) -> Any:
        assert self._pipe.poll(60.0), "no answer"
        found = self._pipe.recv()
        if isinstance(found, BaseException):
            raise found
        return found

    def call(self, name: str, *args: Any) -> Any:
        self.begin(name, *args)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(("close", ()))
            self.process.join(SECONDS)
        self.kill()


class ServedRank(Rank):
    """Methods with values that travel."""

    def start(self, slots: Sequence[int]) -> None:
        """Start a load into fresh blocks."""
        self.blocks = self.take(len(slots))
        self.ticket = self.load(self.blocks, slots)

    def hold_side(self) -> None:
        self.side().pause()

    def step_side(self, count: int) -> None:
        self.side().step(count)

    def wait_side(self, count: int) -> bool:
        return self.side().wait_pending(count, SECONDS)

    def check(self, slots: Sequence[int]) -> None:
        self.expect(self.blocks, slots)

    def store_and_check(self, slots: Sequence[int]) -> None:
        """Store blocks of these contents; every record is whole once it is done."""
        blocks = self.take(len(slots))
        self.fill_blocks(blocks, slots)
        assert outcome_of(self.store(blocks, slots)).done
        self.expect_records(slots)

    def ended(self) -> tuple[bool, str]:
        outcome = outcome_of(self.ticket)
        return outcome.done, outcome.cause


def _serve(pipe: Connection, make: type[Rank], folder: Path, rank: int, num_ranks: int) -> None:
    served = make(folder, rank, num_ranks, connect=False)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(served, name)(*args))
        except BaseException as fault:
            pipe.send(RuntimeError(repr(fault)))
            raise
        if name == "close":
            return
