"""What is refused before a Ray is started, and what is swept."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayhicache as hc
from rayhicache.actors import cluster as clusters
from rayhicache.actors.local_ray import FOLDER, sweep_folders
from rayhicache.errors import ArenaTooLarge, ClusterExists, InvalidRequest
from rayhicache.memory.arena import Arena

MIB = 1 << 20


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for arenas; a launch that comes as far as starting Ray fails the test."""
    monkeypatch.setattr(clusters, "LocalRay", lambda config: pytest.fail("Ray was started"))
    with tempfile.TemporaryDirectory(prefix=f"rhc-{secrets.token_hex(3)}-", dir="/dev/shm") as name:
        yield Path(name) / "arenas"


def test_a_name_that_is_up_on_this_machine_is_refused_at_once(root: Path) -> None:
    arena = Arena.create_or_adopt(root, "chat", "node0", 4 * MIB)
    try:
        with pytest.raises(ClusterExists, match="another name"):
            hc.launch(hc.ClusterConfig(name="chat", arena_root=str(root)))
    finally:
        arena.unlink()


def test_arenas_that_this_machine_cannot_hold_are_refused_at_once(root: Path) -> None:
    config = hc.ClusterConfig(arena_bytes=1 << 44, local_nodes=2, arena_root=str(root))
    with pytest.raises(ArenaTooLarge):
        hc.launch(config)
    assert not root.exists()


def test_folders_of_processes_that_are_gone_are_swept_and_no_others() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{ended.pid}-", dir="/tmp"))
    mine = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir="/tmp"))
    try:
        assert gone in sweep_folders()
        assert not gone.exists()
        assert mine.exists()
    finally:
        mine.rmdir()


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens"),
    [("a string", 4), ([], 4), (["a", [1]], 4), ([3], 4), ([None], 4), ([[1, "b"]], 4), (["a"], 0)],
)
def test_a_job_of_something_else_than_prompts_is_refused(prompts: Any, max_new_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="list of strings"):
        hc.GenerateJob(prompts=prompts, max_new_tokens=max_new_tokens)


FIRST = """
import rayhicache as hc
from rayhicache.actors.local_ray import LocalRay
LocalRay(hc.ClusterConfig(local_nodes=1)).stop()
"""


@pytest.mark.ray
def test_a_local_ray_starts_where_ray_never_ran(tmp_path: Path) -> None:
    """Ray itself doesn't make the folder that it notes its newest address in."""
    environment = os.environ | {"RAY_TMPDIR": str(tmp_path / "new")}
    done = subprocess.run(
        [sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


WITHOUT_WORKERS = """
import rayhicache as hc
from rayhicache.actors.link import RayPort
from rayhicache.errors import InvalidRequest
config = hc.ClusterConfig(name="bare", workers_per_node=0, local_nodes=1, arena_root=ROOT)
with hc.launch(config) as cluster:
    assert cluster.status().workers == ()
    RayPort("bare", "node0", client="own engine", call_seconds=9.0, pull_seconds=9.0).close()
    try:
        cluster.submit(hc.GenerateJob(prompts=[[1, 2, 3]], max_new_tokens=2))
    except InvalidRequest as refused:
        assert "no worker" in str(refused)
    else:
        raise AssertionError("taken")
"""


@pytest.mark.ray
def test_a_tier_without_workers_takes_engines_and_no_jobs() -> None:
    with tempfile.TemporaryDirectory(prefix="rhc-", dir="/dev/shm") as root:
        program = f"ROOT = {root!r}{WITHOUT_WORKERS}"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=180
        )
    assert done.returncode == 0, done.stderr
