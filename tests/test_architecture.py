"""The house keeps its own rules, and each rule catches what it is there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import architecture as house


@pytest.mark.parametrize("root", house.PACKAGE_ROOTS)
def test_the_walk_sees_every_committed_file_of_both_roots(root: str) -> None:
    seen = set(house.files(root))
    assert seen
    if shutil.which("git") is None or not (house.ROOT / ".git").exists():
        pytest.skip("no git here, so nothing to count against")
    listed = subprocess.run(
        ["git", "ls-files", "--", root], cwd=house.ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    committed = {house.ROOT / name for name in listed if name.endswith(".py")}
    present = {path for path in committed if path.exists()}
    assert len(seen) >= len(present)
    assert present <= seen


def test_no_file_is_seen_under_two_names() -> None:
    found = [path.resolve() for root in house.PACKAGE_ROOTS for path in house.files(root)]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("rule", house.PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_the_library_keeps(rule: house.Rule) -> None:
    _expect_kept(rule, house.PACKAGE_ROOTS)


@pytest.mark.parametrize("rule", house.EVERYWHERE_RULES, ids=lambda rule: rule.__name__)
def test_everything_keeps(rule: house.Rule) -> None:
    _expect_kept(rule, house.PACKAGE_ROOTS | house.OTHER_ROOTS)


def _expect_kept(rule: house.Rule, roots: dict[str, str]) -> None:
    broken = [f"{module.name}: {said}" for module in house.modules(roots) for said in rule(module)]
    assert not broken, "\n".join([rule.__doc__ or "", *broken])


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * house.FUNCTION_LINES_MAX
LONG_FILE = "x = 1\n" * (house.FILE_LINES_MAX + 1)
DOCUMENTED = '"""Doc."""\n'

BREAKS = [
    (house.floors, "rayhicache.memory.arena", "from rayhicache.client import TierClient"),
    (house.floors, "rayhicache.memory.arena", "from rayhicache import client"),
    (house.floors, "rayhicache.memory.arena", "from ..client import TierClient"),
    (house.floors, "rayhicache.memory.arena", "from rayhicache.wire import codec"),
    (house.floors, "rayhicache.memory.arena", "import rayhicache"),
    (house.floors, "rayhicache.memory.arena", "from rayhicache import launch"),
    (house.floors, "rayhicache.memory.arena", "def f():\n    import rayhicache.pools.base"),
    (house.floors, "rayhicache.errors", "import rayhicache.config"),
    (house.floors, "rayhicache.client", "from rayhicache.testing import faults"),
    (house.floors, "rayhicache.testing.faults", "from rayhicache.actors import l2_pool"),
    (house.floors, "rayhicache.cli", "from rayhicache import launch"),
    (house.floors, "rayhicache.utils", "import os"),
    (house.core_is_pure, "rayhicache.core.tier", "import torch"),
    (house.core_is_pure, "rayhicache.core.tier", "import threading"),
    (house.core_is_pure, "rayhicache.core.tier", "from time import monotonic"),
    (house.core_is_pure, "rayhicache.core.tier", "from rayhicache.config import Limits"),
    (house.core_is_pure, "rayhicache.core.tier", "open('file')"),
    (house.ray_stays_in_actors, "rayhicache.client", "import ray"),
    (house.ray_stays_in_actors, "rayhicache.client", "def f():\n    import ray"),
    (house.ray_stays_in_actors, "rayhicache.testing.faults", "from ray.util import state"),
    (house.ray_stays_in_actors, "rayhicache", "from rayhicache.actors.cluster import launch"),
    (house.cuda_stays_in_device, "rayhicache.pools.base", "torch.cuda.synchronize()"),
    (house.cuda_stays_in_device, "rayhicache.pools.base", "from torch import cuda"),
    (house.cuda_stays_in_device, "rayhicache.pools.base", "from torch.cuda import Stream"),
    (house.cuda_stays_in_device, "rayhicache.pools.base", "tensor.cuda()"),
    (house.public_names_are_documented, "rayhicache.client", "x = 1"),
    (house.public_names_are_documented, "rayhicache.client", DOCUMENTED + "def f(): ..."),
    (house.public_names_are_documented, "rayhicache.client", DOCUMENTED + "class C: ..."),
    (
        house.public_names_are_documented,
        "rayhicache.client",
        DOCUMENTED + 'class C:\n    """Doc."""\n    async def f(self): ...',
    ),
    (house.files_and_functions_are_short, "rayhicache.client", LONG_FILE),
    (house.files_and_functions_are_short, "rayhicache.client", LONG_FUNCTION),
    (house.no_guessing_at_attributes, "rayhicache.client", "hasattr(x, 'y')"),
    (house.no_guessing_at_attributes, "rayhicache.client", "any(map(hasattr, xs))"),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept: raise"),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept Exception: raise"),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept (OSError, Exception): g()"),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept BaseException: g()"),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept BaseException as e: g(e)"),
    (house.no_broad_except, "rayhicache.client", "with contextlib.suppress(Exception): f()"),
    (house.actors_have_one_name, "examples.quickstart", "import actors"),
    (house.actors_have_one_name, "examples.quickstart", "from actors.cluster import Cluster"),
]

KEEPS = [
    (house.floors, "rayhicache.memory.arena", "from rayhicache.core.keys import PageKey"),
    (house.floors, "rayhicache.memory.arena", "from .port import Port"),
    (house.floors, "rayhicache.actors.cluster", "from rayhicache import client"),
    (house.floors, "rayhicache.testing.faults", "from rayhicache.client import TierClient"),
    (house.floors, "rayhicache.testing.ray_cluster", "import rayhicache.actors.cluster"),
    (house.floors, "rayhicache", "from rayhicache.client import TierClient"),
    (house.core_is_pure, "rayhicache.core.tier", "import hashlib"),
    (house.core_is_pure, "rayhicache.memory.arena", "import mmap"),
    (house.ray_stays_in_actors, "rayhicache.actors.cluster", "import ray"),
    (house.ray_stays_in_actors, "rayhicache.cli", "import ray"),
    (house.ray_stays_in_actors, "rayhicache.testing.ray_cluster", "import ray"),
    (
        house.ray_stays_in_actors,
        "rayhicache",
        "def __getattr__(name):\n    from rayhicache.actors import cluster",
    ),
    (house.cuda_stays_in_device, "rayhicache.device.cuda", "torch.cuda.synchronize()"),
    (house.public_names_are_documented, "rayhicache.client", DOCUMENTED + "def _f(): ..."),
    (house.files_and_functions_are_short, "rayhicache.client", LONG_FILE[6:]),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept OSError: g()"),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept BaseException:\n g()\n raise"),
    (house.no_broad_except, "rayhicache.client", "try: f()\nexcept BaseException as e: s.e = e"),
    (
        house.no_broad_except,
        "rayhicache.client",
        "try: f()\nexcept BaseException as e: done.set_exception(e)",
    ),
    (house.actors_have_one_name, "examples.quickstart", "import rayhicache.actors"),
]


@pytest.mark.parametrize(("rule", "name", "source"), BREAKS)
def test_a_rule_catches_what_breaks_it(rule: house.Rule, name: str, source: str) -> None:
    assert list(rule(house.Module(name, source)))


@pytest.mark.parametrize(("rule", "name", "source"), KEEPS)
def test_a_rule_lets_pass_what_keeps_it(rule: house.Rule, name: str, source: str) -> None:
    assert list(rule(house.Module(name, source))) == []


def test_a_relative_import_is_resolved_from_a_package_too() -> None:
    package = house.Module("rayhicache.core", "from ..client import TierClient", is_package=True)
    assert list(house.floors(package))


def test_every_rule_is_shown_to_catch_something() -> None:
    assert {rule for rule, _, _ in BREAKS} == {*house.PACKAGE_RULES, *house.EVERYWHERE_RULES}


def test_the_folder_actors_refuses_its_short_name() -> None:
    said = _python("import actors")
    assert said.returncode == 1
    assert "import rayhicache.actors" in said.stderr


def test_the_folder_actors_is_imported_through_the_link() -> None:
    said = _python("import rayhicache.actors as a; print(a.__path__[0])")
    assert said.returncode == 0, said.stderr
    assert Path(said.stdout.strip()).resolve() == house.ROOT / "actors"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=house.ROOT, capture_output=True, text=True, check=False)
