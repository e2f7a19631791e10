"""The `cpu` device and its decorators do what every device does."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from rayhicache.device.cpu import CpuDevice
from rayhicache.device.cpu_stream import CpuEvent, CpuStream
from rayhicache.device.protocols import Device, Direction, Stream
from rayhicache.errors import GateTimeout
from rayhicache.testing.device_conformance import DeviceConformance
from rayhicache.testing.faults import (
    BreakingDevice,
    DeviceDecorator,
    FailingDevice,
    HoldingDevice,
)


def _released() -> HoldingDevice:
    device = HoldingDevice(CpuDevice(), {"p1"})
    device.release()
    return device


DEVICES: dict[str, Callable[[], CpuDevice | DeviceDecorator]] = {
    "cpu": CpuDevice,
    "decorated": lambda: DeviceDecorator(CpuDevice()),
    "holding": _released,
    "failing": lambda: FailingDevice.seeded(CpuDevice(), seed=1, probability=0.0),
    "breaking": lambda: BreakingDevice(CpuDevice(), layer_id=99),
}


class TestCpuDevice(DeviceConformance):
    @pytest.fixture(params=DEVICES)
    def device(self, request: pytest.FixtureRequest) -> Iterator[Device]:
        device = DEVICES[request.param]()
        yield device
        device.close()

    @contextlib.contextmanager
    def holding(self, device: Device, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, CpuStream)
        stream.pause()
        yield
        stream.resume()


def test_a_stepped_stream_runs_just_so_many_operations() -> None:
    stream, seen = CpuStream("a"), list[int]()
    stream.pause()
    for number in range(3):
        stream.enqueue(functools.partial(seen.append, number), str(number))
    stream.step(2)
    assert seen == [0, 1]
    assert stream.pending() == ["2"]
    stream.resume()
    assert stream.synchronize(10)
    assert seen == [0, 1, 2]
    stream.close()


def test_a_fault_of_a_stream_is_told_to_all_who_wait_for_it() -> None:
    first, then, seen = CpuStream("a"), CpuStream("b"), list[int]()
    before, after = CpuEvent(), CpuEvent()
    first.record(before)
    first.enqueue(_fault, "fault")
    first.enqueue(lambda: seen.append(1))
    first.record(after)
    then.wait(after)
    then.enqueue(lambda: seen.append(2))
    assert before.synchronize(10)
    with pytest.raises(RuntimeError, match="broken"):
        after.synchronize(10)
    with pytest.raises(RuntimeError, match="broken"):
        then.synchronize(10)
    assert seen == []
    first.close()
    then.close()


def test_the_host_as_a_stream_waits_with_a_limit() -> None:
    device = CpuDevice(wait_seconds=0.02)
    stream, event = device.new_stream("a"), device.new_event()
    stream.pause()
    stream.record(event)
    with pytest.raises(GateTimeout):
        device.current_stream().wait(event)
    device.close()


def test_the_current_stream_is_the_context_s_own() -> None:
    device = CpuDevice()
    mine, seen = device.new_stream("mine"), list[Stream]()
    with device.use(mine):
        other = threading.Thread(target=lambda: seen.append(device.current_stream()))
        other.start()
        other.join()
        assert device.current_stream() is mine
    assert seen == [device.current_stream()]
    device.close()


def test_a_failing_device_fails_the_same_layers_for_the_same_seed() -> None:
    def rolls(seed: int) -> list[bool]:
        device = FailingDevice.seeded(CpuDevice(), seed=seed, probability=0.5)
        return [device._fails(Direction.LOAD, layer_id) for layer_id in range(64)]

    assert rolls(3) == rolls(3)
    assert rolls(3) != rolls(4)


def _fault() -> NoReturn:
    raise ValueError("broken")
