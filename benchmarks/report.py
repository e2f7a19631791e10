"""What a benchmark found: rows with their limits, as a table for people and JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number.

    Attributes:
        name, value, unit: of the number.
        limit: the best that the hardware allows, measured in the same run; None if there is none.
        must: the number has to be this good; None if nothing depends on it.
        aim: the number we would like; None if there is no aim.
        smaller_is_better: which way is good.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    must: float | None = None
    aim: float | None = None
    smaller_is_better: bool = True

    @property
    def holds(self) -> bool:
        """Whether the number is as good as it must be."""
        if self.must is None:
            return True
        return self.value <= self.must if self.smaller_is_better else self.value >= self.must


def finish(
    name: str,
    rows: Sequence[Row],
    packages: Sequence[str] = (),
    *,
    hardware: str = "",
    driver: str = "",
) -> int:
    """Print the rows and write `results/<name>.json`; the exit status, 1 if a row doesn't hold.

    Args:
        packages: whose versions matter.
        hardware: what was measured, if that isn't the processor.
        driver: its version.
    """
    report = {
        "hardware": hardware or _hardware(),
        "driver": driver,
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "command": f"python -m benchmarks.{name}",
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{name} on {report['hardware']}")
    for row in rows:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("limit", row.limit), ("must", row.must), ("aim", row.aim))
            if bound is not None
        ]
        verdict = "" if row.holds else "  MISSED"
        print(f"  {row.name:<44} {row.value:>10.3f} {row.unit:<8} {', '.join(bounds)}{verdict}")
    missed = [row.name for row in rows if not row.holds]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _hardware() -> str:
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return f"{' / '.join(sorted(models)) or platform.machine()}, {os.cpu_count()} cores"
