"""The demonstration: its workload, its figures, and one short run of the whole."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayhicache.actors.job import Output
from rayhicache.core.jobs import PartReport

ROOT = Path(__file__).resolve().parents[2]
KEYS = [
    "requests",
    "prompt_tokens",
    "restored_local_tokens",
    "restored_remote_tokens",
    "recomputed_tokens",
    "hit_rate",
    "ttft_cold_ms_p50",
    "ttft_restored_ms_p50",
    "identical",
]


@pytest.fixture(scope="module")
def quickstart() -> Any:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples/quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def output(worker: str, *, prompt: int = 100, local: int = 0, remote: int = 0) -> Output:
    report = PartReport(
        prompt_tokens=prompt,
        restored_local_tokens=local,
        restored_remote_tokens=remote,
        recomputed_tokens=prompt - local - remote,
        ttft_seconds=0.1,
        worker=worker,
    )
    return Output(tokens=(1, 2), text=None, report=report)


def test_a_prompt_is_the_whole_chat_so_far(quickstart: Any) -> None:
    (chat,) = quickstart.make_chats(1, turns=3)
    opening = chat.ask()
    assert opening == chat.text[: quickstart.OPENING_TOKENS]
    chat.hear(output("a"))
    said = quickstart.OPENING_TOKENS
    follow = chat.text[said : said + quickstart.TURN_TOKENS]
    assert chat.ask() == [*opening, 1, 2, *follow]


def test_every_source_has_text_for_every_turn_and_no_two_begin_alike(quickstart: Any) -> None:
    chats = quickstart.make_chats(len(quickstart.SOURCES), turns=8)
    assert {len(chat.text) for chat in chats} == {quickstart.said_before(8)}
    assert len({tuple(chat.text[:64]) for chat in chats}) == len(chats)


def test_those_whom_one_worker_answered_come_back_together(quickstart: Any) -> None:
    chats = quickstart.make_chats(4, turns=2)
    assert quickstart.waves(chats) == [chats], "nobody has a home before the first answer"
    for chat, worker in zip(chats, "abab", strict=True):
        chat.hear(output(worker))
    assert quickstart.waves(chats) == [[chats[0], chats[2]], [chats[1], chats[3]]]
    chats[0].hear(output("b"))
    assert [chat.moved for chat in chats] == [True, False, False, False]


def test_times_are_compared_over_the_same_prompts(quickstart: Any) -> None:
    exchanges = [
        quickstart.Exchange([0], output("a")),
        quickstart.Exchange([0], output("a", local=60)),
        quickstart.Exchange([0], output("b", remote=40)),
    ]
    cold = quickstart.ColdRun([(1, 2)] * 3, [9.0, 0.4, 0.6])
    figures = quickstart.summary(exchanges, cold)
    assert list(figures) == KEYS
    assert figures["hit_rate"] == pytest.approx(1 / 3)
    assert figures["ttft_cold_ms_p50"] == pytest.approx(500)
    assert figures["ttft_restored_ms_p50"] == pytest.approx(100)
    assert figures["identical"] is True


def test_one_token_that_differs_is_not_identical(quickstart: Any) -> None:
    cold = quickstart.ColdRun([(1, 3)], [0.1])
    assert quickstart.summary([quickstart.Exchange([0], output("a"))], cold)["identical"] is False


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_chats_move_between_two_nodes_and_no_answer_changes(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "examples/quickstart.py"), "--show-race"]
    small = ["--chats", "4", "--turns", "2"]
    ran = subprocess.run(
        [*script, *small], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads((tmp_path / "build" / "demo.json").read_text())
    assert list(figures) == KEYS
    assert figures["requests"] == 8
    assert figures["restored_local_tokens"] > 0
    assert figures["restored_remote_tokens"] > 0
    assert figures["identical"] is True
    said = " ".join(ran.stdout.split())
    assert "Every answer is bit-identical to a cold run." in said
    for pool in ("kv", "index"):
        assert f"The {pool} pool's copies are late." in said
    assert said.count("under it 0.") == 2
    assert "gate 0 of" not in said
