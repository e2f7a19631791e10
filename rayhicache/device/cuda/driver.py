"""The few calls of NVIDIA's driver that torch doesn't offer, through ctypes.

ctypes releases the GIL during a call, so a copy thread that enqueues thousands of fragments
doesn't hold up the engine's Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ORDER_ANY = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY: sources stay unchanged until the copy is done
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_kind", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Driver:
    """Calls of libcuda in the current context. Any thread may call; a failure is RuntimeError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # The second form, of CUDA 13, lost the argument that named the failed copy.
        self._batch_second = _has(library, "cuMemcpyBatchAsync_v2")
        self.can_batch = self._batch_second or _has(library, "cuMemcpyBatchAsync")
        self._attributes = (_CopyAttributes * 1)(
            _CopyAttributes(_ORDER_ANY, _Location(0, 0), _Location(0, 0), 0)
        )
        self._from_first = (ctypes.c_size_t * 1)(0)

    def copy_batch(
        self, targets: int, sources: int, sizes: int, count: int, stream: torch.cuda.Stream
    ) -> None:
        """Enqueue `count` copies in one call.

        Args:
            targets, sources, sizes: addresses of `uint64[count]` in host memory, read during the
                call.
            stream: not the legacy default stream.
        """
        arguments: list[Any] = [
            ctypes.c_void_p(targets),
            ctypes.c_void_p(sources),
            ctypes.c_void_p(sizes),
            ctypes.c_size_t(count),
            self._attributes,
            self._from_first,
            ctypes.c_size_t(1),
        ]
        if self._batch_second:
            call = self._library.cuMemcpyBatchAsync_v2
        else:
            call = self._library.cuMemcpyBatchAsync
            arguments.append(ctypes.byref(ctypes.c_size_t()))
        self._check("cuMemcpyBatchAsync", call(*arguments, ctypes.c_void_p(stream.cuda_stream)))

    def copy_rows(
        self,
        host: tuple[int, int],
        device: tuple[int, int],
        shape: tuple[int, int],
        *,
        load: bool,
        stream: torch.cuda.Stream,
    ) -> None:
        """Enqueue one strided copy.

        Args:
            host, device: address of the first row, and bytes from one row to the next.
            shape: bytes of a row, and rows.
        """
        call = Copy2D(width=shape[0], height=shape[1])
        if load:
            call.source_kind, call.source_host, call.source_pitch = _HOST, host[0], host[1]
            call.target_kind, call.target_device, call.target_pitch = _DEVICE, *device
        else:
            call.source_kind, call.source_device, call.source_pitch = _DEVICE, *device
            call.target_kind, call.target_host, call.target_pitch = _HOST, host[0], host[1]
        self._check(
            "cuMemcpy2DAsync",
            self._library.cuMemcpy2DAsync_v2(
                ctypes.byref(call), ctypes.c_void_p(stream.cuda_stream)
            ),
        )

    def function_of(self, kernel: int, shared_bytes: int) -> int:
        """A library's kernel as a function of the current context.

        Args:
            shared_bytes: dynamic shared memory that it may ask for.
        """
        function = ctypes.c_void_p()
        self._check(
            "cuKernelGetFunction",
            self._library.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(kernel)),
        )
        attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        result = self._library.cuFuncSetAttribute(function, attribute, shared_bytes)
        self._check("cuFuncSetAttribute", result)
        assert function.value is not None
        return function.value

    def launch(
        self,
        function: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        values: Sequence[int],
        stream: torch.cuda.Stream,
    ) -> None:
        """Launch a kernel of one-dimensional blocks whose arguments are all 64-bit integers."""
        arguments = (ctypes.c_int64 * len(values))(*values)
        start = ctypes.addressof(arguments)
        pointers = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
        self._check(
            "cuLaunchKernel",
            self._library.cuLaunchKernel(
                ctypes.c_void_p(function),
                *(ctypes.c_uint(n) for n in (grid, 1, 1, threads, 1, 1, shared_bytes)),
                ctypes.c_void_p(stream.cuda_stream),
                pointers,
                None,
            ),
        )

    def _check(self, what: str, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            said = (text.value or b"unknown").decode()
            raise RuntimeError(f"{what} failed with {result}: {said}")


@lru_cache(maxsize=1)
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        OSError: there is none.
    """
    return Driver(ctypes.CDLL("libcuda.so.1"))


def _has(library: ctypes.CDLL, name: str) -> bool:
    try:
        library[name]
    except AttributeError:
        return False
    return True
