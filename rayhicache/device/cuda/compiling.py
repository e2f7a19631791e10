"""CUDA C++ of this package, compiled at first use by NVIDIA's own packages; no build step."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import torch

from rayhicache.device.cuda.driver import Driver, driver

_compiling = threading.Lock()


class Kernel:
    """A kernel of one device, with a struct as its one argument. Any thread may launch it."""

    def __init__(self, calls: Driver, function: int, device: torch.device) -> None:
        self.device = device
        self._driver = calls
        self._function = function

    def launch(self, job: Any, *, grid: int, threads: int, stream: torch.cuda.Stream) -> None:
        """Enqueue `grid` blocks of `threads` threads. Doesn't block.

        Args:
            job: the struct, a `ctypes.Structure`; copied during the call.
        """
        with torch.cuda.device(self.device):
            # A thread that has called nothing of CUDA yet has no context: the driver needs one.
            torch.cuda.set_device(self.device)
            self._driver.launch(self._function, grid, threads, 0, job, stream.cuda_stream)


@lru_cache(maxsize=32)
def _compiled(source: str, name: str, index: int) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    Device(index).set_current()
    major, minor = torch.cuda.get_device_capability(index)
    options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}")
    return Program(source, code_type="c++", options=options).compile("cubin").get_kernel(name)


def compiled(source: str, name: str, index: int) -> Kernel | None:
    """The kernel `name` of some CUDA C++ for a GPU; None without NVIDIA's compiler package.

    Compiles at first use, about a second.
    """
    try:
        with _compiling:
            kernel = _compiled(source, name, index)
    except ImportError:
        return None
    calls = driver()
    return Kernel(calls, calls.function_of(int(kernel.handle), 0), torch.device("cuda", index))
