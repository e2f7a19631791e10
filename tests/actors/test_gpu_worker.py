"""A worker that can't come up says why, typed, and closes what it had opened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rayhicache.engines.transformers_engine as engines
from rayhicache.actors import gpu_worker
from rayhicache.actors.gpu_worker import GpuWorker
from rayhicache.actors.settings import worker_settings
from rayhicache.config import ClusterConfig
from rayhicache.device.cpu import CpuDevice
from rayhicache.errors import DeviceFull
from rayhicache.wire.codec import encode


class WatchedDevice(CpuDevice):
    """Says whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


def test_a_device_without_room_for_the_model_is_a_typed_error_and_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[WatchedDevice] = []

    def open_device(_: GpuWorker) -> WatchedDevice:
        opened.append(WatchedDevice())
        return opened[-1]

    def engine(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 900 GiB.\nAdvice of many lines")

    monkeypatch.setattr(GpuWorker, "_device", open_device)
    monkeypatch.setattr(gpu_worker, "RayPort", lambda *_, **__: None)
    monkeypatch.setattr(gpu_worker, "name_process", lambda **_: None)
    monkeypatch.setattr(engines, "TransformersEngine", engine)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    settings = worker_settings(ClusterConfig(), "node0", "f00d", "default/worker/node0/0")
    worker = GpuWorker(encode(settings))  # it tries, logs, and doesn't fail
    with pytest.raises(DeviceFull, match="900 GiB") as error:
        worker.ready()
    assert "Advice" not in str(error.value)
    assert "num_blocks" in error.value.remedy
    assert [device.closed for device in opened] == [True, True]
