"""Calls of NVIDIA's driver that reach another process's memory, through ctypes."""

from __future__ import annotations

import ctypes

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class Ipc:
    """Calls of libcuda in the calling thread's context. A failure is RuntimeError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def export(self, address: int) -> tuple[str, int]:
        """The handle of the allocation that holds an address, and the offset in it."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._check(
            "cuMemGetAddressRange",
            self._library.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            ),
        )
        handle = _Handle()
        result = self._library.cuIpcGetMemHandle(ctypes.byref(handle), base)
        self._check("cuIpcGetMemHandle", result)
        return bytes(handle.reserved).hex(), address - base.value

    def open(self, handle: str) -> int:
        """Where this process sees another's allocation. Once per handle."""
        found = ctypes.c_uint64()
        passed = _Handle.from_buffer_copy(bytes.fromhex(handle))
        result = self._library.cuIpcOpenMemHandle_v2(
            ctypes.byref(found), passed, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        self._check("cuIpcOpenMemHandle", result)
        return found.value

    def close(self, address: int) -> None:
        """Undo `open`; a failure is passed over, since the memory may be gone."""
        self._library.cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def device_address(self, address: int) -> int:
        """Where streams see registered host memory."""
        found = ctypes.c_uint64()
        result = self._library.cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        self._check("cuMemHostGetDevicePointer", result)
        return found.value

    def _check(self, what: str, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            raise RuntimeError(f"{what} failed with {result}: {(text.value or b'?').decode()}")
