"""Words for tests of the client: a worker with small pools, and a port that is watched."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from rayhicache.client import TierClient
from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import IndexFormat, RecordLayout
from rayhicache.core.outcomes import Reserved
from rayhicache.core.slots import SlotRef
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.gate import Gate
from rayhicache.device.limits import CopyLimits
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.staging import StagedPlan
from rayhicache.errors import RayHiCacheError
from rayhicache.memory.local import LocalPort
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.port import Attachment, OpenSlots, Port
from rayhicache.pools.attention import MLAPool
from rayhicache.pools.base import PoolSet
from rayhicache.pools.index import IndexPool, NSAPool
from rayhicache.requests import Found, Load, ModelIdentity
from rayhicache.testing import poison
from rayhicache.testing.faults import DeviceDecorator

PAGE, BLOCK, NUM_BLOCKS, LAYERS = 64, 16, 24, (0, 1, 2)
SECONDS = 20.0
IDENTITY = ModelIdentity(model="model", revision="r1", config_digest="c1")

Answer = TypeVar("Answer")


def prompt(number: int, length: int) -> list[int]:
    """Token ids; those of different numbers differ from the first on."""
    return [number * 10_000 + at for at in range(length)]


class WatchedPort:
    """A port that counts its calls, says which threads made them, and fails where it is told."""

    def __init__(self, inner: Port) -> None:
        self._inner = inner
        self._changed = threading.Condition()
        self.calls: Counter[str] = Counter()
        self.threads: Counter[str] = Counter()
        self.faults: dict[str, RayHiCacheError] = {}

    def wait_for(self, name: str, count: int = 1) -> bool:
        """Block until a call has returned so many times."""
        with self._changed:
            return self._changed.wait_for(lambda: self.calls[name] >= count, SECONDS)

    def attach(self, layout: RecordLayout, open_slots: Callable[[], OpenSlots]) -> Attachment:
        return self._call("attach", lambda: self._inner.attach(layout, open_slots))

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        return self._call("lookup", lambda: self._inner.lookup(keys))

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        return self._call("reserve", lambda: self._inner.reserve(keys, parent=parent, group=group))

    def commit(self, refs: Sequence[SlotRef], digests: Sequence[tuple[int, ...]]) -> int:
        return self._call("commit", lambda: self._inner.commit(refs, digests))

    def abort(self, refs: Sequence[SlotRef], *, sealed: bool) -> None:
        self._call("abort", lambda: self._inner.abort(refs, sealed=sealed))

    def unseal(self, refs: Sequence[SlotRef]) -> None:
        self._call("unseal", lambda: self._inner.unseal(refs))

    def release(self, lease: int) -> None:
        self._call("release", lambda: self._inner.release(lease))

    def doubt(self, keys: Sequence[PageKey]) -> None:
        self._call("doubt", lambda: self._inner.doubt(keys))

    def close(self) -> None:
        self._call("close", self._inner.close)

    def _call(self, name: str, call: Callable[[], Answer]) -> Answer:
        try:
            if name in self.faults:
                raise self.faults[name]
            return call()
        finally:
            with self._changed:
                self.calls[name] += 1
                self.threads[threading.current_thread().name] += 1
                self._changed.notify_all()


class SteppedDevice(DeviceDecorator):
    """Copies of one direction stop before a layer is enqueued, until the test lets them go on.

    Args:
        stop: how many layers are enqueued first.
    """

    def __init__(self, direction: Direction, stop: int) -> None:
        super().__init__(CpuDevice(wait_seconds=SECONDS))
        self._direction = direction
        self._stop = stop
        self.reached = threading.Event()
        self.go = threading.Event()

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        for at, (layer_id, transfers) in enumerate(staged.layers()):
            if staged.direction is self._direction and at == self._stop:
                self.reached.set()
                assert self.go.wait(SECONDS)
            for transfer in transfers:
                yield self.inner.copy_layer(staged, transfer, layer_id, stream)


class Worker:
    """Pools of latent rows and index keys in blocks of 16, and a client with pages of 64."""

    def __init__(
        self,
        owner: ArenaOwner,
        *,
        device: CpuDevice | DeviceDecorator | None = None,
        identity: ModelIdentity = IDENTITY,
        page_tokens: int = PAGE,
        row_dim: int = 12,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.device = device or CpuDevice(wait_seconds=SECONDS)
        gate = Gate()
        blocks: Any = {"layer_ids": LAYERS, "num_blocks": num_blocks, "block_tokens": BLOCK}
        self.pool = NSAPool(
            MLAPool(
                self.device, gate, latent_dim=8, row_dim=row_dim, dtype=torch.float32, **blocks
            ),
            IndexPool(
                self.device,
                gate,
                entries=BLOCK,
                index_format=IndexFormat(key_bytes=8, scale_bytes=4),
                **blocks,
            ),
        )
        self.pools = PoolSet(self.device, gate, [self.pool])
        self.memories = self.pools.memories()
        self.port = WatchedPort(LocalPort(owner))
        self.client = TierClient(
            self.port,
            self.pools,
            identity,
            page_tokens=page_tokens,
            limits=CopyLimits(wait_seconds=SECONDS),
        )
        poison.poison(self.memories)

    def take(self, tokens: int) -> list[int]:
        """Blocks for so many tokens."""
        blocks = self.pools.allocate(-(-tokens // BLOCK))
        assert blocks is not None
        return blocks

    def compute(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Stand in for a forward: each block's contents derive from all tokens up to its end."""
        poison.fill(self.memories, dict(zip(blocks, contents(tokens), strict=False)))

    def expect(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """The blocks hold what `compute` made of these tokens; waits for nothing."""
        poison.check(self.memories, dict(zip(blocks, contents(tokens), strict=False)))

    def store(self, tokens: Sequence[int], *, stop: int | None = None, **how: Any) -> None:
        """Compute a prompt into fresh blocks, store it, wait for the end, free and poison."""
        blocks = self.take(len(tokens))
        self.compute(tokens, blocks)
        prompt = self.client.prompt(tokens, **how)
        ticket = self.client.store("s", prompt, blocks, stop=stop or len(tokens))
        outcome = ticket.result(SECONDS)
        assert outcome is not None
        assert outcome.done
        poison.poison(self.memories, blocks)
        self.pools.free(blocks)

    def lookup(self, tokens: Sequence[int], **how: Any) -> Found:
        return self.client.lookup(self.client.prompt(tokens, **how))

    def hits(self, tokens: Sequence[int], **how: Any) -> int:
        """How many tokens could be restored; nothing stays leased."""
        found = self.lookup(tokens, **how)
        self.client.release(found)
        return found.tokens

    def load(self, found: Found, blocks: Sequence[int], **how: Any) -> Any:
        return self.client.load([Load(id="l", found=found, blocks=blocks, **how)])

    def restore(self, tokens: Sequence[int]) -> int:
        """Look up, load, read through the gate and check every byte; tokens restored."""
        found = self.lookup(tokens)
        if not found.tokens:
            return 0
        blocks = self.take(found.tokens)
        ticket = self.load(found, blocks)
        self.read(blocks)
        self.expect(tokens, blocks)
        assert ticket.result(SECONDS).done
        poison.poison(self.memories, blocks)
        self.pools.free(blocks)
        return found.tokens

    def read(self, blocks: Sequence[int]) -> None:
        """Read every layer of every pool as a forward does."""
        with self.pools.reading(blocks):
            for layer_id in LAYERS:
                self.pool.get_kv_buffer(layer_id)
                self.pool.get_index_k_with_scale_buffer(layer_id)

    def check(self) -> None:
        """Nothing is held, open or lost."""
        assert self.pools.allocator.num_free() == self.pools.num_blocks
        assert self.pools.allocator.num_held() == 0
        assert self.pools.gate.open_tickets() == ()
        self.pools.allocator.check()

    def close(self) -> None:
        assert self.client.close(SECONDS)
        self.device.close()


def contents(tokens: Sequence[int]) -> list[bytes]:
    """Names of a prompt's blocks, of the last one too if it isn't full."""
    ends = range(BLOCK, len(tokens) + BLOCK, BLOCK)
    return [hashlib.blake2b(repr(list(tokens[:end])).encode()).digest() for end in ends]


MakeWorker = Callable[..., Worker]
