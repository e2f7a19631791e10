"""Which device a worker gets, and that a machine without a GPU is asked for nothing of one."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from rayhicache.device.cpu import CpuDevice
from rayhicache.device.cuda.opening import ways_lacking
from rayhicache.device.gpus import shown
from rayhicache.device.opening import describe, open_device
from rayhicache.errors import DeviceNotFound

PROGRAM = """
import sys
import rayhicache.cli
import rayhicache.actors.cluster
import rayhicache.actors.gpu_worker
import rayhicache.engines.transformers_engine
from rayhicache.device.opening import describe, open_device
for kind in ("auto", "cpu"):
    device = open_device(kind, has_gpu=False)
    assert describe(device) == "cpu"
    device.close()
print([name for name in sys.modules if name.startswith("rayhicache.device.cuda")])
"""


def test_without_a_gpu_nothing_of_the_cuda_device_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("kind", "has_gpu"), [("auto", False), ("cpu", False), ("cpu", True)])
def test_a_worker_without_a_gpu_is_on_the_host(kind: str, has_gpu: bool) -> None:
    device = open_device(kind, has_gpu=has_gpu)
    assert isinstance(device, CpuDevice)
    assert describe(device) == "cpu"
    device.close()


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(DeviceNotFound, match="none was reserved") as error:
        open_device("cuda", has_gpu=False)
    assert "auto" in error.value.remedy


@pytest.fixture
def unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gave a GPU, and torch can't see one."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("unusable")
def test_a_gpu_that_cannot_be_used_is_refused_by_cuda_and_passed_over_by_auto(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(DeviceNotFound, match="use GPU 0"):
        open_device("cuda", has_gpu=True)
    with caplog.at_level(logging.WARNING):
        device = open_device("auto", has_gpu=True)
    assert isinstance(device, CpuDevice)
    device.close()
    (record,) = [one for one in caplog.records if one.name.startswith("rayhicache")]
    assert "pools are on the host" in record.getMessage()


@pytest.mark.parametrize(
    ("capability", "has_kernel", "can_batch", "words"),
    [
        ((9, 0), True, True, []),
        ((10, 0), True, True, []),
        ((8, 0), False, True, ["8.0"]),
        ((9, 0), False, True, ["cuda-core"]),
        ((9, 0), True, False, ["cuMemcpyBatchAsync"]),
        ((7, 5), False, False, ["7.5", "cuMemcpyBatchAsync"]),
    ],
)
def test_what_a_gpu_cannot_do_is_a_line_each(
    capability: tuple[int, int], has_kernel: bool, can_batch: bool, words: list[str]
) -> None:
    lines = ways_lacking(capability, has_kernel=has_kernel, can_batch=can_batch)
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [
        (None, 2, ["0", "1"]),
        ("", 2, []),
        ("1", 2, ["1"]),
        ("1, 0", 2, ["1", "0"]),
        ("0,2,1", 2, ["0"]),
        ("-1", 2, []),
        ("0,-1,1", 2, ["0"]),
        ("NoDevFiles", 2, []),
        ("GPU-8932f937,1", 2, ["GPU-8932f937", "1"]),
    ],
)
def test_gpus_are_shown_as_cuda_reads_its_variable(
    variable: str | None, count: int, expected: list[str]
) -> None:
    assert shown(variable, count) == expected
