"""The `cuda` device does what every device does, on every way to copy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from rayhicache.device.protocols import Device, Stream
from rayhicache.testing.device_conformance import DeviceConformance

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@contextlib.contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    """Hold a stream with a kernel that spins, for longer than a test needs, or until the end.

    A GPU can't be paused from the host without a kernel of one's own; a sleep of known length
    is let run out.
    """
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
    yield


class TestCudaDevice(DeviceConformance):
    @pytest.fixture(params=["engine", "kernel", "both", "strided", "triton"])
    def device(self, request: pytest.FixtureRequest) -> Iterator[Device]:
        from rayhicache.device.cuda.choice import CopyChoice
        from rayhicache.device.cuda.device import CudaDevice

        choice = {
            "engine": CopyChoice(load=(), store=()),
            "triton": CopyChoice(load=((1 << 40, 1.0),), store=((1 << 40, 1.0),)),
            "kernel": CopyChoice(load=((1 << 40, 1.0),), store=((1 << 40, 1.0),)),
            "strided": CopyChoice(load=(), store=(), strided_from=0),
            "both": CopyChoice(load=((1 << 40, 0.5),), store=((1 << 40, 0.5),)),
        }[request.param]
        device = CudaDevice(choice=choice)
        if request.param == "triton":
            pytest.importorskip("triton")
            device._kernel = None
        yield device
        torch.cuda.synchronize()
        device.close()

    @contextlib.contextmanager
    def holding(self, device: Device, stream: Stream) -> Iterator[None]:
        from rayhicache.device.cuda.stream import CudaStream

        assert isinstance(stream, CudaStream)
        with held(stream.stream):
            yield
        assert threading.current_thread() is threading.main_thread()
