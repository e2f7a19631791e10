"""Open the device that a worker was told to use. What a GPU needs is imported where it is used."""

from __future__ import annotations

import logging

from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Device
from rayhicache.errors import DeviceNotFound

log = logging.getLogger(__name__)


def open_device(
    kind: str, *, has_gpu: bool, copy_table: str = "", wait_seconds: float = 30.0
) -> Device:
    """The device for a worker's pools. The caller closes it.

    Args:
        kind: one of `rayhicache.config.DEVICES`.
        has_gpu: whether a GPU was reserved for this process, which then sees it as the first.
        copy_table: path of a table of copies, empty for the one known for the GPU.
        wait_seconds: of the `cpu` device's waits.

    Raises:
        DeviceNotFound: `cuda`, and there is no GPU, or it can't be used. `auto` goes on on the
            host, with one warning if there is a GPU.
        InvalidConfig: the table of copies is broken.
    """
    if kind == "cuda" and not has_gpu:
        raise DeviceNotFound(
            asked="put a worker's pools on a GPU",
            found="none was reserved for it",
            remedy="start its node with GPUs in Ray's books, or choose the device auto or cpu",
        )
    if kind != "cpu" and has_gpu:
        from rayhicache.device.cuda.opening import open_gpu

        try:
            return open_gpu(copy_table=copy_table)
        except DeviceNotFound as fault:
            if kind == "cuda":
                raise
            log.warning(
                "the GPU of this worker can't be used; its pools are on the host: %s", fault
            )
    return CpuDevice(wait_seconds=wait_seconds)


def describe(device: Device) -> str:
    """A device for people: `cpu`, or `cuda` and the GPU's name."""
    place = device.torch_device
    if place.type != "cuda":
        return place.type
    from rayhicache.device.cuda.opening import name_of

    return f"cuda, {name_of(place.index or 0)}"
