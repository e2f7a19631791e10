"""The bare tier passes the suite that every way to it passes."""

from __future__ import annotations

import pytest

from rayhicache.testing.tier_conformance import Place, TierConformance, TierSession
from tiers import new_tier


class TestTier(TierConformance):
    @pytest.fixture
    def place(self) -> Place:
        tier = new_tier(num_slots=4)
        return Place(first=TierSession(tier, 1), second=TierSession(tier, 2), num_slots=4)
