"""Words for tests of the move path: pools, records in an arena of plain memory, and a copier."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayhicache.core.layout import IndexFormat
from rayhicache.core.plan import TransferPlan, plan_pages
from rayhicache.core.slots import divide_regions
from rayhicache.device.copier import Copier, LoadRequest, StoreRequest
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.cpu_stream import CpuStream
from rayhicache.device.gate import Gate
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Device, Direction, Event, Stream
from rayhicache.device.space import HostRegion, TransferSpace
from rayhicache.device.ticket import Outcome, Ticket
from rayhicache.pools.attention import MHAPool, MLAPool
from rayhicache.pools.base import CompositePool, DevicePool, PoolSet
from rayhicache.pools.index import IndexPool, NSAPool
from rayhicache.testing import poison
from rayhicache.testing.faults import DeviceDecorator, FailingDevice

SECONDS = 20.0
BLOCK, PAGE, NUM_BLOCKS, NUM_SLOTS = 16, 64, 24, 6
PER_PAGE = PAGE // BLOCK

Pool = DevicePool | CompositePool
Make = Callable[[Device, Gate], Pool]


def mha(device: Device, gate: Gate, **other: Any) -> MHAPool:
    shape = {"num_heads": 2, "key_dim": 4, "value_dim": 6, "dtype": torch.bfloat16}
    return MHAPool(device, gate, **_common([0, 1, 2, 3]) | shape | other)


def mla(device: Device, gate: Gate, **other: Any) -> MLAPool:
    shape = {"latent_dim": 8, "row_dim": 12, "dtype": torch.float32}
    return MLAPool(device, gate, **_common([0, 1, 2, 3]) | shape | other)


def index(device: Device, gate: Gate, **other: Any) -> IndexPool:
    shape = {"entries": BLOCK, "index_format": IndexFormat(key_bytes=8, scale_bytes=4)}
    return IndexPool(device, gate, **_common([0, 2]) | shape | other)


def nsa(device: Device, gate: Gate) -> NSAPool:
    return NSAPool(mla(device, gate), index(device, gate))


def _common(layer_ids: list[int]) -> dict[str, Any]:
    return {"layer_ids": layer_ids, "num_blocks": NUM_BLOCKS, "block_tokens": BLOCK}


class World:
    """One worker's pools with the arena of its node, poisoned all over."""

    def __init__(
        self,
        *makes: Make,
        device: CpuDevice | DeviceDecorator | None = None,
        limits: CopyLimits | None = None,
        page_tokens: int = PAGE,
    ) -> None:
        self.device = device or CpuDevice(wait_seconds=SECONDS)
        self.gate = Gate()
        made = [make(self.device, self.gate) for make in makes or (nsa,)]
        self.pool: Any = made[0]
        self.pools = PoolSet(self.device, self.gate, made)
        self.memories = self.pools.memories()
        self.layout = self.pools.layout(page_tokens)
        widest = max(self.layout.shape(group.name).nbytes for group in self.layout.groups)
        data_bytes = NUM_SLOTS * widest * len(self.layout.groups)
        regions = divide_regions(self.layout, data_offset=0, data_bytes=data_bytes)
        self.host = torch.full((data_bytes,), poison.POISON, dtype=torch.uint8)
        self.space = TransferSpace(
            self.layout,
            self.memories,
            {
                each.group: HostRegion(region=each, data=self.host[each.offset :])
                for each in regions
            },
        )
        self.copier = Copier(
            self.device,
            self.space,
            self.gate,
            allocator=self.pools.allocator,
            limits=limits or CopyLimits(wait_seconds=SECONDS),
        )
        poison.poison(self.memories)

    def stream(self, direction: Direction) -> CpuStream:
        stream = self.copier._lanes[direction].stream
        assert isinstance(stream, CpuStream)
        return stream

    @property
    def loads(self) -> CpuStream:
        return self.stream(Direction.LOAD)

    @property
    def stores(self) -> CpuStream:
        return self.stream(Direction.STORE)

    def take(self, count: int) -> list[int]:
        blocks = self.pools.allocate(count)
        assert blocks is not None
        return blocks

    def plan(self, blocks: Sequence[int], slots: Sequence[int]) -> TransferPlan:
        return plan_pages(self.layout, "full", slots, dict.fromkeys(self.pools.pools, blocks))

    def load(
        self, blocks: Sequence[int], slots: Sequence[int], *, id: str = "a", **other: Any
    ) -> Ticket:
        request = LoadRequest(id=id, plan=self.plan(blocks, slots))
        return self.copier.start_loading([request], **other)

    def store(
        self, blocks: Sequence[int], slots: Sequence[int], *, id: str = "a", **other: Any
    ) -> Ticket:
        plan = self.plan(blocks, slots)
        owned = dict.fromkeys(self.pools.pools, tuple(blocks))
        request = StoreRequest(id=id, blocks=owned, plan=lambda: plan)
        return self.copier.start_writing([request], **other)

    def fill_records(self, slots: Sequence[int]) -> None:
        """Block k of the record in slot s gets the contents of `keys_of([s])[k]`."""
        for spec in self.layout.pools:
            for component, part in enumerate(spec.components):
                for layer_id in spec.layer_ids:
                    rows = self.space.host_rows(spec.name, layer_id, component)
                    for slot in slots:
                        for at, key in enumerate(self.keys_of([slot])):
                            rows[slot, at] = poison.content(
                                key, spec.name, layer_id, component, part.block_bytes
                            )

    def keys_of(self, slots: Sequence[int]) -> list[bytes]:
        per_page = self.layout.page_tokens // BLOCK
        return [bytes([slot, at]) for slot in slots for at in range(per_page)]

    def expect(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """The blocks hold what `fill_records` put into the slots."""
        poison.check(self.memories, dict(zip(blocks, self.keys_of(slots), strict=False)))

    def fill_blocks(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        poison.fill(self.memories, dict(zip(blocks, self.keys_of(slots), strict=False)))

    def check(self) -> None:
        """Nothing is held or open, and no block got lost."""
        assert self.pools.allocator.num_held() == 0
        assert self.copier.num_open() == 0
        assert self.gate.open_tickets() == ()
        self.pools.allocator.check()

    def close(self) -> None:
        inner = self.device.inner if isinstance(self.device, DeviceDecorator) else self.device
        for stream in inner._streams:
            stream.resume()
        drained = self.copier.close(SECONDS)
        self.device.close()
        assert drained
        self.check()


class WatchedStream:
    """The calling thread as a stream, which tells before it blocks."""

    name = "watched"

    def __init__(self, inner: Stream, news: queue.SimpleQueue[object]) -> None:
        self._inner = inner
        self._news = news

    def record(self, event: Event) -> None:
        self._inner.record(event)

    def wait(self, event: Event) -> None:
        if not event.query():
            self._news.put("blocked")
        self._inner.wait(event)


class Reader(threading.Thread):
    """Runs a call in its own thread; `news` has "blocked" each time that it comes to a wait for a
    copy that isn't done, and its value or its error at the end.
    """

    def __init__(self, device: CpuDevice | DeviceDecorator, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.news: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._device = device
        self._call = call
        self.start()

    def run(self) -> None:
        inner = self._device.inner if isinstance(self._device, DeviceDecorator) else self._device
        watched: Any = WatchedStream(inner.current_stream(), self.news)
        with inner.use(watched):
            try:
                self.news.put(self._call())
            except BaseException as fault:
                self.fault = fault  # raised by `value`
                self.news.put(fault)

    def next(self) -> object:
        return self.news.get(timeout=SECONDS)

    def value(self) -> Any:
        """What the call returned; raises what it raised."""
        while (found := self.next()) == "blocked":
            pass
        self.join(SECONDS)
        if isinstance(found, BaseException):
            raise found
        return found


def as_bytes(value: object) -> list[torch.Tensor]:
    """The tensors of a reader's answer, as copies of their bytes: NaNs compare too."""
    parts = value if isinstance(value, tuple) else (value,)
    return [part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in parts]


def all_enqueued(ticket: Ticket) -> None:
    """Return once the copier has enqueued every layer of every pool."""
    with ticket.counter._changed:
        layers = ticket.counter._pending | set(ticket.counter._recorded)
    for layer_id, pool in sorted(layers):
        ticket.counter._await_record(layer_id, pool)


def step_until(stream: CpuStream, done: Callable[[], bool]) -> None:
    """Let a paused stream go, one operation at a time, until something is so."""
    while not done():
        stream.step()


class Barrier:
    """Holds the copier's thread before it enqueues one layer."""

    def __init__(self, layer_id: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._layer_id = layer_id

    def __call__(self, _: Direction, layer_id: int) -> bool:
        if layer_id == self._layer_id:
            self.reached.set()
            assert self.open.wait(SECONDS)
        return False


def held_world(layer_id: int, **limits: Any) -> tuple[World, Barrier]:
    """A world whose copier stops before it enqueues `layer_id`."""
    barrier = Barrier(layer_id)
    device = FailingDevice(CpuDevice(wait_seconds=SECONDS), barrier)
    return World(
        nsa, device=device, limits=CopyLimits(**{"wait_seconds": SECONDS} | limits)
    ), barrier


def outcome_of(ticket: Ticket) -> Outcome:
    outcome = ticket.result(SECONDS)
    assert outcome is not None
    return outcome


def read(world: World, layer_id: int, blocks: list[int]) -> object:
    with world.pools.reading(blocks):
        return world.pool.get_key_buffer(layer_id).clone()
