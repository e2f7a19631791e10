"""Which GPUs this process may use, asked of NVIDIA's management library: no torch, no context."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs as `CUDA_VISIBLE_DEVICES` has them; none without a GPU or a driver.

    Doesn't touch a GPU, and may be called before a process forks.
    """
    count = _count()
    return tuple(shown(os.environ.get(VISIBLE), count)) if count else ()


def shown(variable: str | None, count: int) -> list[str]:
    """Which of `count` GPUs a value of `CUDA_VISIBLE_DEVICES` shows; None shows all.

    As CUDA reads it: what follows a name that isn't there, as -1, is not shown.
    """
    if variable is None:
        return [str(index) for index in range(count)]
    found: list[str] = []
    for name in (part.strip() for part in variable.split(",")):
        is_index = name.isdecimal() and int(name) < count
        if not is_index and not name.startswith(("GPU-", "MIG-")):
            break
        found.append(name)
    return found


def _count() -> int:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        # Some containers have the GPUs without that library.
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    if library.nvmlInit_v2():
        return 0
    count = ctypes.c_uint()
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    return 0 if failed else count.value
