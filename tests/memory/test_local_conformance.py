"""The port within one process passes the suite of every way to a tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from arenas import open_owner, plain_layout
from rayhicache.memory.local import LocalPort
from rayhicache.memory.port import OpenSlots
from rayhicache.testing.tier_conformance import Place, TierConformance


class TestLocalPort(TierConformance):
    @pytest.fixture
    def place(self, root: Path) -> Place:
        owner = open_owner(root)
        ports = LocalPort(owner, client="first"), LocalPort(owner, client="second")
        for port in ports:
            attached = port.attach(plain_layout(), lambda: OpenSlots(reading=(), writing=()))
        return Place(first=ports[0], second=ports[1], num_slots=attached.regions[0].num_slots)
