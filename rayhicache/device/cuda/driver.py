"""The few calls of NVIDIA's driver that torch doesn't offer, through ctypes.

ctypes releases the GIL during a call, so a copy thread that enqueues thousands of fragments
doesn't hold up the engine's Python. Streams are passed as handles: torch's `cuda_stream`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ORDER_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_ORDER_ANY = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY
_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
_SHARED_BYTES_MAX = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ

STRIDED_WORDS = 14  # 64-bit words of one CUDA_MEMCPY3D_BATCH_OP


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """Calls of libcuda in the current context. Any thread may call; a failure is RuntimeError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # The second forms, of CUDA 13, lost the argument that named the failed copy.
        self._second = _has(library, "cuMemcpyBatchAsync_v2")
        self.can_batch = self._second or _has(library, "cuMemcpyBatchAsync")
        self.can_stride = _has(
            library, "cuMemcpy3DBatchAsync_v2" if self._second else "cuMemcpy3DBatchAsync"
        )
        self.can_wait = _has(library, "cuStreamWaitValue32_v2")
        self._attributes = {
            settled: (_CopyAttributes * 1)(
                _CopyAttributes(order, _Location(0, 0), _Location(0, 0), 0)
            )
            for settled, order in ((True, _ORDER_ANY), (False, _ORDER_STREAM))
        }
        self._from_first = (ctypes.c_size_t * 1)(0)

    def copy_batch(
        self, targets: int, sources: int, sizes: int, count: int, stream: int, *, settled: bool
    ) -> None:
        """Enqueue `count` copies in one call.

        Args:
            targets, sources, sizes: addresses of `uint64[count]` in host memory, read during the
                call.
            stream: not the legacy default stream.
            settled: the sources are there already and stay so: they may be read out of the
                stream's order. What a kernel before it still writes isn't settled.
        """
        arguments: list[Any] = [
            ctypes.c_void_p(targets),
            ctypes.c_void_p(sources),
            ctypes.c_void_p(sizes),
            ctypes.c_size_t(count),
            self._attributes[settled],
            self._from_first,
            ctypes.c_size_t(1),
        ]
        if self._second:
            call = self._library.cuMemcpyBatchAsync_v2
        else:
            call = self._library.cuMemcpyBatchAsync
            arguments.append(ctypes.byref(ctypes.c_size_t()))
        self._check("cuMemcpyBatchAsync", call(*arguments, ctypes.c_void_p(stream)))

    def copy_strided(self, table: int, count: int, stream: int) -> None:
        """Enqueue `count` copies of rows that lie a stride apart on both sides, in one call.

        Sources are read in the stream's order.

        Args:
            table: address of `int64[count, STRIDED_WORDS]` as `strided_row` makes them, in host
                memory, read during the call.
            stream: not the legacy default stream.
        """
        arguments: list[Any] = [ctypes.c_size_t(count), ctypes.c_void_p(table)]
        if self._second:
            call = self._library.cuMemcpy3DBatchAsync_v2
        else:
            call = self._library.cuMemcpy3DBatchAsync
            arguments.append(ctypes.byref(ctypes.c_size_t()))
        flags = ctypes.c_ulonglong(0)
        self._check("cuMemcpy3DBatchAsync", call(*arguments, flags, ctypes.c_void_p(stream)))

    @staticmethod
    def strided_row(
        source: tuple[int, int], target: tuple[int, int], nbytes: int, rows: int
    ) -> list[int]:
        """One row of a table for `copy_strided`.

        Args:
            source, target: address of the first row, and bytes from one row to the next.
            nbytes, rows: of a row, and their number.
        """
        sides = [[_POINTER, address, stride, rows, 0] for address, stride in (source, target)]
        return [*sides[0], *sides[1], nbytes, rows, 1, _ORDER_STREAM]

    def write_value(self, address: int, value: int, stream: int) -> None:
        """Enqueue the write of a 32-bit word, after all memory writes that lie before it."""
        self._check(
            "cuStreamWriteValue32",
            self._library.cuStreamWriteValue32_v2(
                ctypes.c_void_p(stream),
                ctypes.c_uint64(address),
                ctypes.c_uint32(value),
                ctypes.c_uint(0),
            ),
        )

    def wait_value(self, address: int, value: int, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until a 32-bit word is `value` or, cyclically, greater."""
        self._check(
            "cuStreamWaitValue32",
            self._library.cuStreamWaitValue32_v2(
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(address),
                ctypes.c_uint32(value),
                ctypes.c_uint(_GEQ),
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
        result = self._library.cuFuncSetAttribute(function, _SHARED_BYTES_MAX, shared_bytes)
        self._check("cuFuncSetAttribute", result)
        assert function.value is not None
        return function.value

    def launch(
        self, function: int, grid: int, threads: int, shared_bytes: int, job: Any, stream: int
    ) -> None:
        """Launch a kernel of one-dimensional blocks whose one argument is a struct, by value.

        Args:
            job: the struct, a `ctypes.Structure`; copied during the call.
        """
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(job))
        self._check(
            "cuLaunchKernel",
            self._library.cuLaunchKernel(
                ctypes.c_void_p(function),
                *(ctypes.c_uint(n) for n in (grid, 1, 1, threads, 1, 1, shared_bytes)),
                ctypes.c_void_p(stream),
                arguments,
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
