"""Work through Ray's job submission, on a real local cluster with its dashboard."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples/submit_job.py")
SECONDS = 120.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the Ray that `rayhicache up` starts, with a tier named `jobs`."""
    root = tmp_path_factory.mktemp("jobs") / "arenas"
    command = [sys.executable, "-m", "rayhicache.cli", "up", "jobs", "--arena-bytes", "16MiB"]
    with subprocess.Popen(
        [*command, "--arena-root", str(root)], stdout=subprocess.PIPE, text=True
    ) as up:
        try:
            assert up.stdout is not None
            said = ""
            for line in up.stdout:
                said += line
                if "Ctrl-C" in line:
                    break
            found = re.search(r"http://[\d.]+:\d+", said)
            assert found is not None, said
            yield found[0]
        finally:
            up.send_signal(signal.SIGTERM)
            assert up.wait(SECONDS) == 0
    assert not root.exists()


def submit(dashboard: str, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--name", name, "--dashboard", dashboard]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_a_submitted_script_reaches_the_tier_and_its_result_comes_back(dashboard: str) -> None:
    sent = submit(dashboard, "jobs")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    lines = sent.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["cold:", "again:", "job"], "no noise of Ray's"
    cold, again = re.findall(r"^(?:cold|again): (\d+) of \d+ .*: (\[.*\])$", sent.stdout, re.M)
    assert int(cold[0]) == 0
    assert int(again[0]) > 0
    assert cold[1] == again[1], "the same tokens"
    assert "SUCCEEDED" in sent.stdout


def test_a_job_that_fails_says_why_and_ends_with_1(dashboard: str) -> None:
    sent = submit(dashboard, "no-such-tier")
    assert sent.returncode == 1
    assert "ClusterNotFound" in sent.stdout
    assert "FAILED" in sent.stdout
