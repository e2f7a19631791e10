"""Arenas of tests lie in a folder of their own on tmpfs, which must be empty again afterwards."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arenas import Bystander


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(f"/dev/shm/rhc-{secrets.token_hex(4)}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def bystander() -> Iterator[Callable[[], Bystander]]:
    """Start processes that are gone by the end of the test."""
    started: list[Bystander] = []

    def start() -> Bystander:
        started.append(Bystander.start())
        return started[-1]

    yield start
    for each in started:
        each.kill()
