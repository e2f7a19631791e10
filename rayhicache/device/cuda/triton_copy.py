"""A copy kernel for any GPU, also before Hopper, and for fragments of any size: Triton's.

Where fragments lie on 16 bytes and are whole vectors, it moves vectors, else bytes. Triton comes
with torch's builds for CUDA; it compiles at first use and keeps what it compiled on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from rayhicache.device.cuda.bulk import Part, Rows
from rayhicache.device.cuda.driver import Driver
from rayhicache.device.cuda.movers import Moving
from rayhicache.device.cuda.stream import CudaEvent
from rayhicache.device.cuda.words import Word, WordEvent

ALIGNMENT = 16
WORDS = 1024  # of one item: 8 KiB where they are of 8 bytes
WARPS = 4


class TritonCopy:
    """The kernel. Any thread may launch it."""

    def __init__(self, program: Any, device: torch.device) -> None:
        self._program = program
        self._device = device

    @staticmethod
    def can_move(sizes: list[int], layers: int) -> bool:
        """Whether such fragments can be moved: all that have bytes."""
        return layers > 0 and all(nbytes > 0 for nbytes in sizes)

    def launch(
        self,
        rows: Rows,
        parts: Sequence[Part],
        position: int,
        *,
        load: bool,
        grid: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Enqueue the move of one layer, a launch per component. Compiles at first use.

        The caller guarantees that layers lie on 16 bytes of a record, as `RecordLayout` has them.

        Args:
            position: of the layer among the pool's own.
            grid: blocks of each launch; fewer if there is less to do.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for part in parts:
                on_device = part.device + position * part.layer_bytes
                ends = (part.host, on_device, rows.record_bytes, part.nbytes)
                word_bytes = 1 if any(number % ALIGNMENT for number in ends) else 8
                items = rows.count * -(-part.nbytes // (WORDS * word_bytes))
                if not items:
                    continue
                self._program[(min(grid, items),)](
                    rows.host_indices,
                    rows.device_indices,
                    part.host_layers,
                    part.host,
                    on_device,
                    position,
                    rows.count,
                    rows.first,
                    rows.record_bytes,
                    rows.blocks_per_page,
                    part.nbytes,
                    load=load,
                    word_bytes=word_bytes,
                    words=WORDS,
                    num_warps=WARPS,
                )


class TritonMover:
    """A `Mover` by that kernel: layer by layer, each with a word behind it.

    Args:
        stream: that the kernel runs on; its own, with the word that it counts up.
        blocks: of threads.
    """

    def __init__(
        self,
        copy: TritonCopy,
        driver: Driver,
        stream: torch.cuda.Stream,
        word: Word,
        moving: Moving,
        *,
        blocks: int,
    ) -> None:
        self._copy = copy
        self._driver = driver
        self._stream = stream
        self._word = word
        self._load = moving.load
        self._blocks = blocks
        self._last: WordEvent | None = None
        place, transfer = moving.place, moving.transfer
        self._rows = Rows(
            host_indices=transfer.host_indices[moving.start :].data_ptr(),
            device_indices=transfer.device_indices[moving.start :].data_ptr(),
            count=moving.stop - moving.start,
            layers=place.layers,
            first=place.first,
            record_bytes=place.record_bytes,
            blocks_per_page=place.blocks_per_page,
        )
        self._parts = [
            Part(
                host=side.host,
                device=side.device,
                nbytes=side.nbytes,
                layer_bytes=side.layer_bytes,
                host_layers=offsets.data_ptr(),
            )
            for side, offsets in zip(place.sides, moving.host_layers, strict=True)
        ]

    def after(self, event: CudaEvent) -> None:
        """See `Mover.after`."""
        event.hold(self._stream)

    def begin(self) -> None:
        """See `Mover.begin`: layers come one by one."""

    def enqueue(self, position: int) -> WordEvent:
        """See `Mover.enqueue`."""
        self._copy.launch(
            self._rows,
            self._parts,
            position,
            load=self._load,
            grid=self._blocks,
            stream=self._stream,
        )
        value = self._word.take(1) + 1
        self._driver.write_value(self._word.address, value & 0xFFFFFFFF, self._stream.cuda_stream)
        self._last = WordEvent(self._driver, self._word, value)
        return self._last

    def last(self) -> WordEvent | None:
        """See `Mover.last`."""
        return self._last


@lru_cache(maxsize=1)
def _program() -> Any:
    try:
        from rayhicache.device.cuda.triton_rows import kernel
    except ImportError:
        return None
    return kernel


def triton_copy(index: int) -> TritonCopy | None:
    """The kernel for a GPU; None where Triton isn't installed."""
    program = _program()
    return None if program is None else TritonCopy(program, torch.device("cuda", index))
