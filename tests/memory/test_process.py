"""Processes are told apart, and their ends are told."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from arenas import Bystander, eventually
from rayhicache.memory.process import (
    ProcessWatcher,
    is_alive,
    open_process,
    own_pid_namespace,
    start_time_of,
    this_process,
)


def test_this_process_lives_and_knows_itself() -> None:
    me = this_process("me")
    assert (me.pid, me.pid_namespace, me.client) == (os.getpid(), own_pid_namespace(), "me")
    assert is_alive(me)


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    me = this_process()
    assert not is_alive(replace(me, start_time=me.start_time - 1))


def test_a_killed_process_is_gone_before_its_parent_has_reaped_it(
    bystander: Callable[[], Bystander],
) -> None:
    other = bystander()
    identity = other.identity
    assert is_alive(identity)
    other.process.kill()
    assert eventually(lambda: not is_alive(identity))
    assert other.process.returncode is None, "nobody has waited for it yet"
    other.kill()
    assert open_process(identity) is None
    assert start_time_of(identity.pid) is None


def test_a_process_name_with_blanks_and_brackets_does_not_shift_the_fields() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R (b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        own_start = this_process().start_time
        other.stdout.readline()
        assert (start_time_of(other.pid) or 0) >= own_start
        other.kill()


def test_the_end_of_each_watched_process_is_told_once(
    bystander: Callable[[], Bystander],
) -> None:
    ended: queue.Queue[int] = queue.Queue()
    watcher = ProcessWatcher(ended.put)
    others = [bystander() for _ in range(3)]
    for number, other in enumerate(others):
        assert watcher.watch(number, other.identity)
    others[1].kill()
    assert ended.get(timeout=10) == 1
    watcher.unwatch(0)
    others[0].kill()
    others[2].kill()
    assert ended.get(timeout=10) == 2
    watcher.close()
    watcher.close()
    assert ended.empty()


def test_a_process_that_is_gone_already_is_not_watched(
    bystander: Callable[[], Bystander],
) -> None:
    other = bystander()
    identity = other.identity
    other.kill()
    watcher = ProcessWatcher(lambda key: pytest.fail(f"told the end of {key}"))
    assert not watcher.watch(1, identity)
    watcher.close()


def test_closing_leaves_no_descriptor_open(bystander: Callable[[], Bystander]) -> None:
    identity = bystander().identity
    before = set(os.listdir("/proc/self/fd"))
    watcher = ProcessWatcher(lambda _key: None)
    watcher.watch(1, identity)
    watcher.close()
    watcher.watch(2, identity)
    watcher.unwatch(1)
    assert set(os.listdir("/proc/self/fd")) == before
