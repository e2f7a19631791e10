from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_runs_as_a_script_and_restores_what_prompts_share() -> None:
    script = [sys.executable, "examples/own_engine.py"]
    said = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == [
        "a: 0 of 200 tokens restored, same answer: True",
        "b: 128 of 228 tokens restored, same answer: True",
        "a: 192 of 200 tokens restored, same answer: True",
        "b: 192 of 228 tokens restored, same answer: True",
    ]
