"""Tables of copies: what is packaged, what is a user's own, and what is broken."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rayhicache.device.cuda.choice import CopyChoice
from rayhicache.device.cuda.copy_table import (
    CAUTIOUS,
    choice_for,
    parse_table,
    read_table,
    table_text,
)
from rayhicache.device.protocols import Direction
from rayhicache.errors import InvalidConfig

OWN = CopyChoice(load=(), store=((8_192, 0.5), (1 << 40, 0.0)), blocks_beside=2, blocks_alone=3)


def changed(**values: Any) -> str:
    return json.dumps(json.loads(table_text("NVIDIA X", OWN)) | values)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(table_text("NVIDIA X", OWN), encoding="utf-8")
    assert read_table(path) == ("NVIDIA X", OWN)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H200 NVL"])
def test_a_known_gpu_has_its_packaged_table(gpu: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choice = choice_for(gpu)
    assert choice.kernel_rows(Direction.LOAD, 8_448, 100) == 100
    assert choice.kernel_rows(Direction.LOAD, 73_728, 100) == 0
    assert not caplog.records


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB", "Tesla H2000"])
def test_an_unknown_gpu_has_a_cautious_table_and_one_line_that_names_the_remedy(
    gpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choice_for(gpu) == CAUTIOUS
    (record,) = caplog.records
    assert gpu in record.getMessage()
    assert "`rayhicache bench`" in record.getMessage()


@pytest.mark.parametrize(("gpu", "lines"), [("NVIDIA X", 0), ("NVIDIA H200", 1)])
def test_an_own_table_wins_and_is_told_when_it_is_of_another_gpu(
    gpu: str, lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.json"
    path.write_text(table_text("NVIDIA X", OWN), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert choice_for(gpu, str(path)) == OWN
    assert len(caplog.records) == lines


def test_numbers_that_are_left_out_are_the_defaults() -> None:
    found = json.loads(table_text("NVIDIA X", OWN))
    del found["blocks_alone"]
    (_, choice) = parse_table(json.dumps(found), "x")
    assert choice.blocks_alone == CopyChoice().blocks_alone
    assert choice.blocks_beside == OWN.blocks_beside


BROKEN = {
    "no rows at all": json.dumps({"format": 1, "gpu": "NVIDIA X", "load": []}),
    "no JSON": "{",
    "too deep": "[" * 200_000,
    "a list": "[]",
    "another format": changed(format=2),
    "a true format": changed(format=True),
    "no name": changed(gpu=""),
    "one more field": changed(colour="red"),
    "no blocks": changed(blocks_alone=0),
    "half a block": changed(blocks_beside=1.5),
    "no rows": changed(load={}),
    "too many rows": changed(load=[{"up_to_bytes": n + 1, "kernel_share": 1} for n in range(65)]),
    "a row of other fields": changed(load=[{"bytes": 1, "kernel_share": 1}]),
    "rows that don't ascend": changed(load=[{"up_to_bytes": 9, "kernel_share": 1}] * 2),
    "no size": changed(load=[{"up_to_bytes": 0, "kernel_share": 1}]),
    "a share over all": changed(store=[{"up_to_bytes": 9, "kernel_share": 1.5}]),
    "no share": changed(store=[{"up_to_bytes": 9, "kernel_share": "all"}]),
    "NaN": changed(store=[{"up_to_bytes": 9, "kernel_share": float("nan")}]),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_table_is_refused_with_its_name_and_the_remedy(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"table of copies mine\.json") as error:
        parse_table(text, "mine.json")
    assert "`rayhicache bench`" in error.value.remedy


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b" " * ((1 << 20) + 1)])
def test_a_file_that_cannot_be_read_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidConfig, match=r"table\.json"):
        choice_for("NVIDIA H200", str(path))
