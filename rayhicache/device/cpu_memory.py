"""Memory of the `cpu` device: reused as soon as its tensor dies, as on a GPU.

So a test without a GPU can see what happens to a copy whose indices were freed.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence

import torch

from rayhicache.device.cpu_stream import CpuEvent, CpuStream


class CachingAllocator:
    """The rule of torch's CUDA allocator, in the host's memory.

    A dead tensor's memory goes to the next request of its size; if streams were recorded on it,
    only after the work that was enqueued there when it died.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: dict[int, list[tuple[torch.Tensor, list[CpuEvent]]]] = {}
        self._live: dict[int, tuple[torch.Tensor, list[CpuStream]]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over free memory of exactly that size, or over new memory."""
        nbytes = dtype.itemsize * math.prod(shape)
        if not nbytes:
            return torch.empty(tuple(shape), dtype=dtype)
        with self._lock:
            memory = self._reused(nbytes)
            if memory is None:
                memory = torch.empty(nbytes, dtype=torch.uint8)
            address = memory.data_ptr()
            self._live[address] = (memory, [])
        # The storage of the tensor holds this buffer and nothing else does: they die together.
        buffer = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(buffer, self._died, address).atexit = False
        return torch.frombuffer(buffer, dtype=dtype).view(tuple(shape))

    def record(self, tensor: torch.Tensor, stream: CpuStream) -> None:
        """Once it dies, keep the tensor's memory until work then enqueued on the stream is done.

        Memory that isn't the allocator's is passed over.
        """
        with self._lock:
            entry = self._live.get(tensor.untyped_storage().data_ptr())
            if entry is not None:
                entry[1].append(stream)

    def _reused(self, nbytes: int) -> torch.Tensor | None:
        blocks = self._free.get(nbytes, [])
        for at, (memory, events) in enumerate(blocks):
            if all(event.query() for event in events):
                del blocks[at]
                return memory
        return None

    def _died(self, address: int) -> None:
        with self._lock:
            memory, streams = self._live.pop(address)
            events = []
            for stream in streams:
                if not stream.closed:
                    event = CpuEvent()
                    stream.record(event)
                    events.append(event)
            self._free.setdefault(memory.numel(), []).append((memory, events))
