"""Open a GPU with the table of copies that fits it, and say once what it can't do."""

from __future__ import annotations

import logging

import torch

from rayhicache.device.cuda.bulk import MIN_CAPABILITY, bulk_kernel
from rayhicache.device.cuda.copy_table import choice_for
from rayhicache.device.cuda.device import CudaDevice
from rayhicache.device.cuda.driver import driver
from rayhicache.errors import DeviceNotFound

log = logging.getLogger(__name__)


def open_gpu(index: int = 0, *, copy_table: str = "") -> CudaDevice:
    """The `cuda` device on one GPU. Logs one line for each way to copy that it can't take.

    Raises:
        DeviceNotFound: no such GPU, or its driver can't be used.
        InvalidConfig: the table of copies is broken.
    """
    try:
        choice = choice_for(name_of(index), copy_table) if torch.cuda.is_available() else None
        device = CudaDevice(index, choice=choice)
        lacking = ways_lacking(
            torch.cuda.get_device_capability(index),
            has_kernel=bulk_kernel(index) is not None,
            can_batch=driver().can_batch,
        )
    except (OSError, RuntimeError) as fault:
        raise DeviceNotFound(
            asked=f"use GPU {index}",
            found=(str(fault).splitlines() or ["its driver can't be used"])[0],
            remedy="see whether nvidia-smi shows the GPU and its driver is as new as torch's CUDA, "
            "or use the cpu device",
        ) from fault
    for line in lacking:
        log.warning("%s: %s", name_of(index), line)
    return device


def name_of(index: int) -> str:
    """The name of a GPU, as in `NVIDIA H200`."""
    return str(torch.cuda.get_device_name(index))


def ways_lacking(capability: tuple[int, int], *, has_kernel: bool, can_batch: bool) -> list[str]:
    """What a GPU and its driver can't do, and what is done instead; a line each."""
    found = []
    if capability < MIN_CAPABILITY:
        found.append(
            f"compute capability {capability[0]}.{capability[1]} has no bulk copies (9.0 has): "
            "small fragments go by a Triton kernel, which takes more of the GPU"
        )
    elif not has_kernel:
        found.append(
            "the package cuda-core, which compiles the copy kernel, isn't installed: small "
            "fragments go by a Triton kernel, which takes more of the GPU; install "
            "`rayhicache[cuda]`"
        )
    if not can_batch:
        found.append(
            "the driver has no cuMemcpyBatchAsync (CUDA 12.8 has): copies take the next best way; "
            "a newer driver is faster"
        )
    return found
