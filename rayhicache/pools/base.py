"""The gate by construction: a pool's tensors are private, and the one way to a layer waits.

Every public method of a pool is marked as reader, writer or metadata. Readers are thin functions
over `layer`, so a new reader is gated without anyone remembering to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from rayhicache.core.layout import (
    ComponentSpec,
    GroupSpec,
    PoolSpec,
    RecordLayout,
    Sharding,
)
from rayhicache.device.gate import Binding, Gate, current_binding
from rayhicache.device.pages import PageAllocator
from rayhicache.device.protocols import Device
from rayhicache.device.space import PoolMemory
from rayhicache.errors import InvalidLayout, UnknownLayer, UnknownPool

Method = TypeVar("Method", bound=Callable[..., object])

READER, WRITER, METADATA = "reader", "writer", "metadata"


def _role(role: str) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        method.__dict__["pool_role"] = role
        return method

    return mark


reader = _role(READER)
writer = _role(WRITER)
metadata = _role(METADATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One tensor of a pool: its shape within one block and layer, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer; 0 is legal."""
        return math.prod(self.shape) * self.dtype.itemsize


class DevicePool:
    """The device memory of one kind of cached state, over the layers that have it.

    Each component is one allocation `uint8[num_layers, num_blocks, block_bytes]`, so layers lie a
    constant stride apart and many layers of a block can move in one strided copy.

    Args:
        name: as it stands in the record layout.
        layer_ids: the model's global ids, ascending; may be sparse.
        num_blocks: blocks of the pool.
        block_tokens: tokens of a block.
        components: its tensors.
        group: the record group that it lives and dies with.
        sharding: whether tensor-parallel ranks hold the same bytes.
    """

    def __init__(
        self,
        device: Device,
        gate: Gate,
        *,
        name: str,
        layer_ids: Sequence[int],
        num_blocks: int,
        block_tokens: int,
        components: Sequence[Component],
        group: str = "full",
        sharding: Sharding = Sharding.REPLICATED,
    ) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._gate = gate
        self._components = tuple(components)
        self._positions = {layer_id: at for at, layer_id in enumerate(layer_ids)}
        shape = (len(layer_ids), num_blocks)
        self.__memory = tuple(
            device.empty((*shape, part.block_bytes), torch.uint8) for part in self._components
        )
        self.__views: dict[tuple[int, int], torch.Tensor] = {}
        self.spec = PoolSpec(
            name=name,
            layer_ids=tuple(layer_ids),
            components=tuple(
                ComponentSpec(
                    name=part.name,
                    # The width is the tensor's own, never a number from a model's config.
                    block_bytes=tensor.shape[-1],
                    dtype=str(part.dtype).removeprefix("torch."),
                )
                for part, tensor in zip(self._components, self.__memory, strict=True)
            ),
            block_tokens=block_tokens,
            group=group,
            sharding=sharding,
        )

    @reader
    def layer(self, layer_id: int, component: int = 0) -> torch.Tensor:
        """One component of a layer, once it is there: `dtype[num_blocks, *shape], device`.

        Makes the caller's current stream wait for the open loads of its binding; blocks the
        thread while a load hasn't enqueued the layer. Don't keep the tensor past the binding.

        Raises:
            UnboundRead: outside `with pools.reading(...)`.
            UnknownLayer: the pool doesn't have the layer.
            LoadFailed, GateTimeout: as `LayerTransferCounter.wait_until`.
        """
        typed = self._typed(layer_id, component)
        current_binding(self.name).wait(layer_id, self.name)
        return typed

    @metadata
    def parts(self) -> tuple[DevicePool, ...]:
        """The pools that this one is made of: itself."""
        return (self,)

    def _writable(self, layer_id: int, component: int = 0) -> torch.Tensor:
        """As `layer`, for writers: doesn't wait for loads, whose blocks can't be written."""
        typed = self._typed(layer_id, component)
        current_binding(self.name).check_write(self.name)
        return typed

    def _memory_for_copies(self) -> PoolMemory:
        """The internal door to the raw bytes, for the copier alone."""
        return PoolMemory(spec=self.spec, components=self.__memory, num_blocks=self.num_blocks)

    def _typed(self, layer_id: int, component: int) -> torch.Tensor:
        """A view of one component of a layer; made once, since a forward asks for hundreds."""
        view = self.__views.get((layer_id, component))
        if view is None:
            position = self._positions.get(layer_id)
            if position is None:
                raise UnknownLayer(
                    asked=f"layer {layer_id} of pool {self.name!r}",
                    found=f"it has layers {tuple(self._positions)}",
                    remedy="use the model's global layer ids",
                )
            part = self._components[component]
            rows, shape = self.__memory[component][position], (self.num_blocks, *part.shape)
            if part.block_bytes:
                view = rows.view(part.dtype).view(shape)
            else:
                view = torch.empty(shape, dtype=part.dtype, device=rows.device)
            self.__views[layer_id, component] = view
        return view


class CompositePool:
    """Pools that an engine uses as one. Its readers are its parts' readers."""

    def __init__(self, *parts: DevicePool) -> None:
        self._parts = parts

    @metadata
    def parts(self) -> tuple[DevicePool, ...]:
        """The pools that this one is made of."""
        return self._parts


class PoolSet:
    """All pools of a worker that share one block table, with their gate and their allocator.

    Raises:
        InvalidLayout: pools of different block counts or sizes, or no pool.
    """

    def __init__(
        self, device: Device, gate: Gate, pools: Sequence[DevicePool | CompositePool]
    ) -> None:
        self.device = device
        self.gate = gate
        self.pools = {part.name: part for pool in pools for part in pool.parts()}
        shapes = {(pool.num_blocks, pool.block_tokens) for pool in self.pools.values()}
        if len(shapes) != 1 or len(self.pools) != sum(len(pool.parts()) for pool in pools):
            raise InvalidLayout(
                asked=f"share one block table among pools {sorted(self.pools)}",
                found=f"(num_blocks, block_tokens) are {sorted(shapes)}",
                remedy="name each pool once, and give all the same blocks",
            )
        ((self.num_blocks, self.block_tokens),) = shapes
        self.allocator = PageAllocator(device, self.num_blocks)

    def pool(self, name: str) -> DevicePool:
        """The pool of that name.

        Raises:
            UnknownPool: there is none.
        """
        if name not in self.pools:
            raise UnknownPool(
                asked=f"pool {name!r}",
                found=f"the pools are {sorted(self.pools)}",
                remedy="name one of these",
            )
        return self.pools[name]

    def layout(self, page_tokens: int, **options: int) -> RecordLayout:
        """The record layout of these pools; widths are those of their tensors.

        Args:
            options: `num_ranks`, `num_stages` and `num_layer_groups` of `RecordLayout`.
        """
        specs = tuple(pool.spec for pool in self.pools.values())
        groups = tuple(GroupSpec(name=name) for name in dict.fromkeys(s.group for s in specs))
        return RecordLayout(page_tokens=page_tokens, pools=specs, groups=groups, **options)

    def reading(
        self,
        blocks: Collection[int] | Mapping[str, Collection[int]],
        *,
        writes: Collection[int] | Mapping[str, Collection[int]] = (),
    ) -> Binding:
        """Bind a forward that reads these blocks and writes `writes`; use it as `with`.

        Every read of every pool inside waits, layer by layer, for the loads that fill one of the
        blocks. With no load open this costs one comparison.

        Args:
            blocks: block ids as host integers, of all pools alike or per pool.

        A graph can be captured inside only if no ticket is open that it would wait for: such a
        wait raises `CaptureRefused`.

        Raises:
            PageBusy: a load is filling a block of `writes`.
        """
        return self.gate.bind(blocks, writes, capturing=self.device.capturing)

    def memories(self) -> dict[str, PoolMemory]:
        """Both sides' door for the copier: the raw bytes of every pool."""
        return {name: pool._memory_for_copies() for name, pool in self.pools.items()}

    def allocate(self, count: int) -> list[int] | None:
        """As `PageAllocator.allocate`."""
        return self.allocator.allocate(count)

    def free(self, blocks: Sequence[int]) -> None:
        """As `PageAllocator.free`; what failed loads left in the blocks is forgotten."""
        self.allocator.free(blocks)
        self.gate.forget(blocks)
