"""Where the rows of a pool lie on both sides, as addresses."""

from __future__ import annotations

from dataclasses import dataclass

from rayhicache.device.space import TransferSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One component of a pool.

    Attributes:
        host, device: address of row 0 of the pool's first layer.
        host_layers: per layer, its offset from the first one's rows in a record.
        layer_bytes: on the device, from one layer to the next.
        nbytes: of a block.
    """

    host: int
    device: int
    host_layers: tuple[int, ...]
    layer_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One pool.

    Attributes:
        sides: its components that have bytes.
        layers: how many it has.
        record_bytes: from one slot to the next.
        blocks_per_page: host indices a slot.
        first: host index of the region's first row.
    """

    sides: tuple[Side, ...]
    layers: int
    record_bytes: int
    blocks_per_page: int
    first: int

    @property
    def sizes(self) -> list[int]:
        """Bytes of a block, of each component."""
        return [side.nbytes for side in self.sides]

    def runs(self) -> list[range]:
        """Runs of layers, by position, that lie a constant stride apart in a record."""
        strides = {
            at: tuple(side.host_layers[at + 1] - side.host_layers[at] for side in self.sides)
            for at in range(self.layers - 1)
        }
        runs, start = [], 0
        for at in range(1, self.layers):
            if at - start > 1 and strides[at - 1] != strides[start]:
                runs.append(range(start, at))
                start = at
        return [*runs, range(start, self.layers)]


def geometry_of(space: TransferSpace, pool: str) -> Geometry:
    """Addresses of both sides of a pool; they hold as long as the space."""
    spec = space.layout.pool(pool)
    blocks = space.layout.blocks_per_page(pool)
    region = space.regions[spec.group].region
    sides = []
    for number, component in enumerate(spec.components):
        if not component.block_bytes:
            continue
        hosts = [space.host_rows(spec.name, i, number).data_ptr() for i in spec.layer_ids]
        memory = space.pools[spec.name].components[number]
        sides.append(
            Side(
                host=hosts[0],
                device=memory.data_ptr(),
                host_layers=tuple(host - hosts[0] for host in hosts),
                layer_bytes=memory.stride(0),
                nbytes=component.block_bytes,
            )
        )
    return Geometry(
        sides=tuple(sides),
        layers=len(spec.layer_ids),
        record_bytes=region.record_bytes,
        blocks_per_page=blocks,
        first=region.first_slot * blocks,
    )
