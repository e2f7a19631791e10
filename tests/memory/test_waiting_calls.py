"""Waiting for what others fill: every wait has a limit and ends with an answer (R28)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arenas import Bystander, attach, eventually, fill, keys, open_owner, plain_layout, store

LONG = 30.0
SHORT = 0.02


def test_a_waiter_wakes_when_its_keys_are_ready(root: Path) -> None:
    owner = open_owner(root)
    writer, reader = attach(owner), attach(owner)
    refs = fill(owner, owner.reserve(keys(1, 2), writer))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(owner.wait_for, keys(1, 2), reader, LONG)
        assert eventually(lambda: owner.num_waiting() == 1)
        owner.commit(refs[:1], writer)
        assert not waiting.done()
        owner.commit(refs[1:], writer)
        assert waiting.result(LONG)
    assert owner.num_waiting() == 0
    owner.close(unlink=True)


def test_a_writer_that_dies_between_reserve_and_commit_leaves_a_miss(
    root: Path, bystander: Callable[[], Bystander]
) -> None:
    owner = open_owner(root)
    reader = attach(owner)
    other = bystander()
    writer = owner.attach(plain_layout(), other.identity).session
    free = owner.stats().free
    fill(owner, owner.reserve(keys(1), writer))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(owner.wait_for, keys(1), reader, LONG)
        assert eventually(lambda: owner.num_waiting() == 1)
        other.kill()
        assert not waiting.result(LONG)
    assert owner.num_waiting() == 0
    assert owner.lookup(keys(1), reader).best == 0
    assert owner.stats().free == free
    owner.check()
    owner.close(unlink=True)


def test_a_writer_that_never_ends_costs_a_waiter_its_limit_and_no_more(root: Path) -> None:
    owner = open_owner(root)
    writer, reader = attach(owner), attach(owner)
    owner.reserve(keys(1), writer)
    begun = time.monotonic()
    assert not owner.wait_for(keys(1), reader, SHORT)
    assert time.monotonic() - begun < SHORT + 2, "generous: this machine may be busy"
    assert owner.num_waiting() == 0
    owner.check()
    owner.close(unlink=True)


@pytest.mark.parametrize("end", ["abort", "detach", "close"])
def test_a_waiter_gets_a_miss_when_what_it_waits_for_or_itself_ends(root: Path, end: str) -> None:
    owner = open_owner(root)
    writer, reader = attach(owner), attach(owner)
    refs = fill(owner, owner.reserve(keys(1), writer))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(owner.wait_for, keys(1), reader, LONG)
        assert eventually(lambda: owner.num_waiting() == 1)
        if end == "abort":
            owner.abort(refs, writer)
        elif end == "detach":
            owner.detach(reader)
        else:
            owner.close(unlink=True)
        assert not waiting.result(LONG)
    assert owner.num_waiting() == 0
    owner.close(unlink=True)


def test_waiting_for_keys_that_nobody_fills_answers_at_once(root: Path) -> None:
    owner = open_owner(root)
    session = attach(owner)
    store(owner, session, keys(1))
    assert owner.wait_for(keys(1), session, LONG)
    assert not owner.wait_for(keys(1, 2), session, LONG)
    owner.close(unlink=True)
