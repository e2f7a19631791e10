"""An answer that can't be read is a fault of the one who gave it, and of nobody else."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import rayhicache.actors.controller as controller_module
import rayhicache.actors.roster as roster_module
from clusters import CONFIG, LIMITS
from rayhicache.actors.controller import Controller
from rayhicache.actors.roster import Roster
from rayhicache.actors.status import PoolStatus
from rayhicache.core.jobs import PartState
from rayhicache.wire.codec import encode

if TYPE_CHECKING:
    import pytest

GARBLED = b"\x00 not a message"
STATUS = PoolStatus(
    seat="node1",
    node="n",
    epoch=1,
    capacity_bytes=0,
    slots=0,
    used=0,
    filling=0,
    leased=0,
    sealed=0,
    hits=0,
    misses=0,
    stored=0,
    evictions=0,
    page_tokens=16,
    token_bytes=0.0,
    tokens_fit=0,
    sessions=(),
)


def test_a_worker_s_garbled_answer_fails_the_part_and_not_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_life = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: first_life)
    monkeypatch.setattr(controller_module, "name_process", lambda **_: None)
    monkeypatch.setattr(controller_module, "ask", lambda *_, **__: GARBLED)
    limits = replace(LIMITS, tries_max=1)  # another try would be routed, which takes a directory
    controller = Controller(encode(replace(CONFIG, limits=limits)))
    controller._roster.workers["w"] = None
    book = controller._book
    book.add_worker("w")
    book.add_job("j", [(1, 2, 3)], 1)
    book.enqueue("j", 0, "w")
    run = book.take("w")
    assert run is not None
    controller._run("w", run)
    (part,) = book.update("j", [0])
    assert part.state is PartState.FAILED
    assert "read or write a message" in part.cause
    assert part.cause.endswith("(try 1 of 1)"), "it is the worker's fault: others may try"


def test_a_pool_s_garbled_status_makes_that_seat_unreachable_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roster = Roster(config=CONFIG, pools={"node0": GARBLED, "node1": encode(STATUS)})
    monkeypatch.setattr(roster_module, "start", lambda pool, *_, **__: pool)
    monkeypatch.setattr(roster_module, "answer", lambda ref, *_: ref)
    assert roster.pool_statuses() == ((STATUS,), ("node0",))
