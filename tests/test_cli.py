"""The command line: what it prints, what it returns, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from rayhicache import cli
from rayhicache.actors.status import ClusterStatus, PoolStatus, SessionStatus, WorkerStatus
from rayhicache.cli import commands
from rayhicache.cli.arguments import make_parser
from rayhicache.cli.showing import show
from rayhicache.config import ClusterConfig
from rayhicache.errors import RayNotFound
from rayhicache.memory.arena import Arena

SECONDS = 90.0


@pytest.fixture
def nowhere() -> str:
    """An address that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def status(*, stopped: bool = False) -> ClusterStatus:
    return ClusterStatus(
        name="chat",
        pools=(
            PoolStatus(
                seat="node0",
                node="f00d",
                epoch=2,
                capacity_bytes=256 << 20,
                slots=1_556,
                used=1_200,
                filling=3,
                leased=4,
                sealed=5,
                hits=60_000,
                misses=700,
                stored=1_300,
                evictions=80,
                page_tokens=64,
                token_bytes=2_688.0,
                tokens_fit=99_584,
                sessions=(
                    SessionStatus(client="worker/0", pid=11, stopped=False),
                    SessionStatus(client="worker/1", pid=12, stopped=stopped),
                ),
            ),
        ),
        unreachable=("node1",),
        workers=(
            WorkerStatus(
                name="worker/0",
                seat="node0",
                device="cuda, NVIDIA H200",
                available=True,
                queued_tokens=0,
            ),
        ),
        queued=2,
        running=1,
    )


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["sideways"],
        ["up", "--arena-bytes", "plenty"],
        ["up", "--model", "unheard-of"],
        ["up", "--address", "auto", "--local-nodes", "2"],
        ["status", "one", "two"],
    ],
)
def test_a_command_that_cannot_be_understood_ends_with_2(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 2
    assert "usage: rayhicache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1B", 1), ("256MiB", 256 << 20), ("8GiB", 8 << 30)]
)
def test_a_size_is_a_number_with_a_unit(text: str, size: int) -> None:
    assert make_parser().parse_args(["up", "--arena-bytes", text]).arena_bytes == size


@pytest.mark.parametrize("command", ["up", "status"])
def test_a_fault_is_three_sentences_on_stderr(
    command: str, nowhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--address", nowhere]) == 1
    printed = capsys.readouterr()
    asked, found, remedy = printed.err.splitlines()[-3:]
    assert nowhere in asked
    assert "refused" in found
    assert "ray start --head" in remedy
    assert ("`rayhicache up` starts one" in remedy) is (command == "status")
    assert printed.out == ""


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ""), ("own.json", str(Path.cwd() / "own.json"))]
)
def test_up_hands_its_devices_on_and_a_path_that_workers_can_use(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ClusterConfig] = []

    def launch(config: ClusterConfig) -> NoReturn:
        asked.append(config)
        raise RayNotFound(asked="launch", found="a test", remedy="none")

    monkeypatch.setattr("rayhicache.actors.cluster.launch", launch)
    words = ["--device", "cuda", "--gpus-per-worker", "0.5"]
    assert cli.main(["up", *words, *(["--copy-table", given] if given else [])]) == 1
    (config,) = asked
    assert (config.device, config.gpus_per_worker) == ("cuda", 0.5)
    assert config.copy_table == expected


def test_a_value_out_of_range_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["up", "--arena-bytes", "5"]) == 1
    assert "arena_bytes = 5" in capsys.readouterr().err


def test_bench_without_a_gpu_is_a_fault_like_others_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "visible_gpus", tuple)
    assert cli.main(["bench", "--out", str(tmp_path / "table.json")]) == 1
    asked, found, remedy = capsys.readouterr().err.splitlines()
    assert "measure the ways to copy" in asked
    assert "sees 0 NVIDIA GPUs" in found
    assert "NVIDIA GPU and driver" in remedy
    assert not list(tmp_path.iterdir())


def test_bench_refuses_a_place_it_could_not_write_to_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "visible_gpus", lambda: ("0",))
    for out in (tmp_path, tmp_path / "missing" / "table.json"):
        assert cli.main(["bench", "--out", str(out)]) == 1
        assert "--out" in capsys.readouterr().err


def test_down_removes_what_a_dead_tier_left_also_without_any_ray(
    tmp_path: Path, nowhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "arenas"
    for tier in ("dead", "other"):
        Arena.create_or_adopt(root, tier, "node0", 1 << 20).close()
    command = ["down", "dead", "--address", nowhere, "--arena-root", str(root)]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert f"Removed {root / 'dead' / 'node0.arena'}." in said
    assert [path.name for path in root.iterdir()] == ["other"]
    assert cli.main(command) == 0, "a second time there is nothing to do"
    assert "No arena of 'dead' was left" in capsys.readouterr().out


def test_down_keeps_an_arena_that_a_live_pool_holds_and_says_so(
    tmp_path: Path, nowhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = Arena.create_or_adopt(tmp_path, "live", "node0", 1 << 20)
    try:
        command = ["down", "live", "--address", nowhere, "--arena-root", str(tmp_path)]
        assert cli.main(command) == 1
        assert arena.path.exists()
        assert "a live pool holds it" in capsys.readouterr().err
    finally:
        arena.close()


@pytest.mark.parametrize("drawn", [True, False])
def test_status_shows_each_pool_and_what_a_token_takes(
    drawn: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not drawn:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    show(status(stopped=True))
    said = capsys.readouterr().out
    assert ("┃" in said) is drawn
    rows = [re.split(r"\s*[│┃]\s*|\s{2,}", line.strip("│┃ ")) for line in said.splitlines()]
    cells = {row[0]: row[1] for row in rows if len(row) == 2}
    assert cells == {
        "seat": "node0",
        "capacity": "256 MiB",
        "used slots": "1,200 of 1,556",
        "filling": "3",
        "leased": "4",
        "sealed": "5",
        "pages hit": "60,000",
        "pages missed": "700",
        "pages evicted": "80",
        "epoch": "2",
        "sessions": "2, 1 stopped",
    }
    assert "Seat node1: its pool doesn't answer." in said
    assert "process 12 (worker/1) is stopped and keeps its leases." in said
    assert "A token takes 2,688 B; 99,584 tokens fit" in said
    assert "Worker worker/0 is on cuda, NVIDIA H200." in said


@pytest.mark.parametrize("seats", [1, 3, 7])
def test_status_is_whole_in_a_narrow_terminal(
    seats: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    one = status()
    many = [dataclasses.replace(one.pools[0], seat=f"node{at}") for at in range(seats)]
    show(dataclasses.replace(one, pools=tuple(many)))
    said = capsys.readouterr().out
    assert said.count("1,200 of 1,556") == seats
    assert all(f"node{at}" in said for at in range(seats))


class Foreground:
    """`rayhicache up` without an address, until it is asked to end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [*COMMAND, "up", "first", "--arena-bytes", "16MiB", "--arena-root", str(root)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if found := re.search(r"Ray's address is ([\d.:]+\d)", line):
                self.address = found[1]
                return
        raise AssertionError(f"it ended with {self.process.wait()}: {self.said}")

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


COMMAND = (sys.executable, "-m", "rayhicache.cli")


@pytest.fixture
def foreground(tmp_path: Path) -> Iterator[Foreground]:
    up = Foreground(tmp_path / "arenas")
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
            up.process.wait(SECONDS)
        assert up.process.stdout is not None
        up.process.stdout.close()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *command], capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_up_status_and_down_on_a_local_ray_leave_nothing(foreground: Foreground) -> None:
    here = ("--address", foreground.address)
    assert "A token takes" in foreground.said
    shown = run("status", "first", *here, "--json")
    (pool,) = json.loads(shown.stdout)["pools"]
    assert (pool["seat"], pool["capacity_bytes"]) == ("node0", 16 << 20)

    beside = (str(foreground.root), "--arena-bytes", "16MiB", "--model", "llama-tiny")
    detached = run("up", "second", *here, "--arena-root", *beside)
    assert detached.returncode == 0, detached.stderr
    assert f"rayhicache down second --address {foreground.address}" in detached.stdout
    again = run("up", "second", *here)
    assert again.returncode == 1
    assert "rayhicache down second" in again.stderr
    assert run("status", "second", *here).returncode == 0, "it stays when `up` has ended"

    down = run("down", "second", *here)
    assert (down.returncode, down.stdout.splitlines()[0]) == (0, "Cluster 'second' is down.")
    unknown = run("status", "second", *here)
    assert unknown.returncode == 1
    assert "['first']" in unknown.stderr

    assert foreground.end(signal.SIGTERM) == 0
    assert not foreground.root.exists()
