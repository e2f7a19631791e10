"""A worker's answer that can't be read fails its part, which is tried again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import rayhicache.actors.controller as module
from clusters import CONFIG
from rayhicache.actors.controller import Controller
from rayhicache.core.jobs import Assignment
from rayhicache.wire.codec import encode

if TYPE_CHECKING:
    import pytest


def test_a_garbled_answer_fails_the_part_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DirectoryClient", lambda *_: None)
    monkeypatch.setattr(module, "name_process", lambda **_: None)
    first_life = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: first_life)
    controller = Controller(encode(CONFIG))
    run = Assignment(job="j", part=0, attempt=1, prompt=(1, 2, 3), max_new_tokens=1)
    failures: list[tuple[str, bool]] = []

    def failed(_: Assignment, cause: str, *, retry: bool, away: str = "") -> None:
        assert not away
        failures.append((cause, retry))

    def garbled(*_: Any, **__: Any) -> bytes:
        return b"\x00 not a message"

    monkeypatch.setattr(module, "ask", garbled)
    monkeypatch.setattr(controller, "_roster", SimpleNamespace(workers={"w": None}))
    monkeypatch.setattr(controller, "_failed", failed)
    controller._run("w", run)
    assert len(failures) == 1
    cause, retry = failures[0]
    assert retry
    assert "read or write a message" in cause
