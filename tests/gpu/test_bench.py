"""`rayhicache bench` on a GPU: what it prints, and that the tier takes the table it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayhicache import cli
from rayhicache.device.cuda import measuring
from rayhicache.device.cuda.bulk import bulk_kernel
from rayhicache.device.cuda.copy_table import choice_for, read_table
from rayhicache.device.cuda.opening import name_of
from rayhicache.device.opening import describe, open_device
from rayhicache.device.protocols import Direction

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KIB = 1 << 10


def test_bench_writes_a_table_that_the_tier_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "SIZES", (8 * KIB, 256 * KIB))
    monkeypatch.setattr(measuring, "MOVE_BYTES", 64 << 20)
    path = tmp_path / "table.json"
    assert cli.main(["bench", "--out", str(path)]) == 0
    said = capsys.readouterr()
    assert name_of(0) in said.err
    rows = [
        line for line in said.out.splitlines() if line.lstrip().startswith(("8,192", "262,144"))
    ]
    assert [line.count("*") for line in rows] == [1, 1, 1, 1], "one way per size and direction"
    gpu, choice = read_table(path)
    assert gpu == name_of(0)
    assert choice == choice_for(gpu, str(path))
    if bulk_kernel(0) is not None:
        # The copy engine takes about a microsecond a fragment: 8 GB/s of small ones.
        assert choice.kernel_rows(Direction.LOAD, 8 * KIB, 100) > 0
    assert choice.kernel_rows(Direction.LOAD, 256 * KIB, 100) < 100
    device = open_device("cuda", has_gpu=True, copy_table=str(path))
    assert describe(device) == f"cuda, {gpu}"
    device.close()
