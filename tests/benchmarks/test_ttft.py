"""The benchmark of first tokens runs on the host, and counts what it says it counts."""

from __future__ import annotations

import pytest

from benchmarks.engine import TINY
from benchmarks.running import Mode, Running
from benchmarks.ttft import FirstToken, main, rows_of


def test_the_tiny_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * len(TINY.prefixes) + 5 * len(TINY.sessions)
    assert sum("restored as cold" in line and " 1.0000 " in line for line in lines) == len(
        TINY.prefixes
    )


def test_writing_through_must_cost_answers_little() -> None:
    seconds = {Mode.NOTHING: 0.010, Mode.THROUGH: 0.0106, Mode.BUSY: 0.02}
    running = Running(sessions=8, seconds=seconds, written=dict.fromkeys(Mode, 1e9))
    missed = [row.name for row in rows_of([], [running]) if not row.holds]
    assert missed == ["a token of 8 sessions, written through"]


def test_a_restored_answer_must_be_the_cold_one() -> None:
    first = FirstToken(prefix=128, cold=1.0, restored=0.1, bound=0.08, alike=0.8)
    rows = rows_of([first], [])
    assert [row.name for row in rows if not row.holds] == [
        "first token after 128 tokens, restored as cold"
    ]
    assert rows[2].value == pytest.approx(1.25)
