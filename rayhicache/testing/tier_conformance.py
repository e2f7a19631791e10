"""What every way to a tier does, as a suite of tests.

Subclass it in a test module and provide the fixture `place`: two sessions of a fresh tier with
one group of one part, whose prefixes need all their pages.

    class TestMyPort(TierConformance):
        @pytest.fixture
        def place(self):
            return Place(first=..., second=..., num_slots=8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pytest

from rayhicache.core.hits import Hit
from rayhicache.core.keys import PageKey
from rayhicache.core.outcomes import Reserved
from rayhicache.core.slots import SlotRef
from rayhicache.core.tier import Tier
from rayhicache.errors import SessionEnded, StaleSlot, UnknownLease


class Holder(Protocol):
    """One attached session: the calls of `Port` that decide about slots."""

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        """See `Port.lookup`."""

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        """See `Port.reserve`."""

    def commit(self, refs: Sequence[SlotRef], digests: Sequence[tuple[int, ...]]) -> int:
        """See `Port.commit`."""

    def abort(self, refs: Sequence[SlotRef], *, sealed: bool) -> None:
        """See `Port.abort`."""

    def unseal(self, refs: Sequence[SlotRef]) -> None:
        """See `Port.unseal`."""

    def release(self, lease: int) -> None:
        """See `Port.release`."""

    def doubt(self, keys: Sequence[PageKey]) -> None:
        """See `Port.doubt`."""

    def close(self) -> None:
        """See `Port.close`."""


@dataclass(slots=True)
class TierSession:
    """A session of a bare `Tier` as a `Holder`; the tier's `check` runs after each call."""

    tier: Tier
    session: int

    def lookup(self, keys: Sequence[PageKey]) -> Hit:
        """See `Port.lookup`."""
        hit = self.tier.lookup(keys, self.session, now=0.0)
        self.tier.check()
        return hit

    def reserve(
        self, keys: Sequence[PageKey], *, parent: PageKey | None, group: str = "full"
    ) -> Reserved | None:
        """See `Port.reserve`."""
        reserved = self.tier.reserve(keys, self.session, parent=parent, group=group)
        self.tier.check()
        return reserved

    def commit(self, refs: Sequence[SlotRef], digests: Sequence[tuple[int, ...]]) -> int:
        """See `Port.commit`."""
        stored = self.tier.commit(refs, self.session, digests=digests)
        self.tier.check()
        return stored

    def abort(self, refs: Sequence[SlotRef], *, sealed: bool) -> None:
        """See `Port.abort`."""
        self.tier.abort(refs, self.session, sealed=sealed)
        self.tier.check()

    def unseal(self, refs: Sequence[SlotRef]) -> None:
        """See `Port.unseal`."""
        self.tier.unseal(refs, self.session)
        self.tier.check()

    def release(self, lease: int) -> None:
        """See `Port.release`."""
        self.tier.release(lease)
        self.tier.check()

    def doubt(self, keys: Sequence[PageKey]) -> None:
        """See `Port.doubt`."""
        self.tier.doubt(keys)
        self.tier.check()

    def close(self) -> None:
        """See `Port.close`."""
        self.tier.end_session(self.session)
        self.tier.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Two sessions of one fresh tier of `num_slots` slots, at least 4."""

    first: Holder
    second: Holder
    num_slots: int

    @property
    def prompt(self) -> list[PageKey]:
        """As many pages as there are slots."""
        return [page(number) for number in range(1, self.num_slots + 1)]


def page(number: int) -> PageKey:
    """The key of a page that the suite made up."""
    return PageKey(number.to_bytes(16, "big"))


def reserved(holder: Holder, keys: Sequence[PageKey]) -> list[SlotRef]:
    """Slots for pages that must all be missing."""
    found = holder.reserve(keys, parent=None)
    assert found is not None
    assert [fill.key for fill in found.fills] == list(keys)
    return [fill.ref for fill in found.fills]


def store(holder: Holder, keys: Sequence[PageKey]) -> None:
    """Reserve and commit, as one chunk."""
    assert holder.commit(reserved(holder, keys), ()) == len(keys)


class TierConformance:
    """Subclass this; see the module."""

    def test_what_was_committed_is_found_by_everybody(self, place: Place) -> None:
        """One call finds and leases every page of the best length."""
        store(place.first, place.prompt[:2])
        hit = place.second.lookup(place.prompt)
        assert list(hit.lengths) == [1, 2]
        assert hit.lease is not None
        assert set(hit.lease.records["full"]) == {0, 1}

    def test_nothing_is_found_before_its_commit(self, place: Place) -> None:
        """Not even by its own filler."""
        reserved(place.first, place.prompt[:1])
        assert place.first.lookup(place.prompt).lease is None

    def test_a_page_is_filled_once_at_a_time(self, place: Place) -> None:
        """The second filler is told who is there and who is on the way."""
        refs = reserved(place.first, place.prompt[:2])
        place.first.commit(refs[:1], ())
        again = place.second.reserve(place.prompt[:3], parent=None)
        assert again is not None
        assert [fill.key for fill in again.fills] == place.prompt[2:3]
        assert list(again.ready) == place.prompt[:1]
        assert list(again.filling) == place.prompt[1:2]

    def test_a_chunk_gets_all_its_slots_or_none(self, place: Place) -> None:
        """A chunk that found no room takes none either."""
        held = reserved(place.first, place.prompt[:2])
        others = [page(100 + number) for number in range(place.num_slots - 1)]
        assert place.second.reserve(others, parent=None) is None
        place.first.abort(held[:1], sealed=False)
        assert place.second.reserve(others, parent=None) is not None

    def test_a_leased_page_is_never_evicted_and_a_released_one_is(self, place: Place) -> None:
        """And the suffix goes first."""
        store(place.first, place.prompt)
        hit = place.second.lookup(place.prompt)
        assert hit.lease is not None
        assert place.first.reserve([page(99)], parent=None) is None
        place.second.release(hit.lease.id)
        assert place.first.reserve([page(99)], parent=None) is not None
        assert place.first.lookup(place.prompt).best == place.num_slots - 1

    def test_a_lease_is_released_exactly_once(self, place: Place) -> None:
        """The second release is an error, not a no-op that hides a fault."""
        store(place.first, place.prompt[:1])
        hit = place.first.lookup(place.prompt)
        assert hit.lease is not None
        place.first.release(hit.lease.id)
        with pytest.raises(UnknownLease):
            place.first.release(hit.lease.id)

    def test_a_slot_is_given_up_exactly_once(self, place: Place) -> None:
        """Whatever call comes second is refused."""
        refs = reserved(place.first, place.prompt[:1])
        place.first.abort(refs, sealed=False)
        for call in (lambda: place.first.commit(refs, ()), lambda: place.first.unseal(refs)):
            with pytest.raises(StaleSlot):
                call()
        with pytest.raises(StaleSlot):
            place.first.abort(refs, sealed=False)

    def test_only_its_filler_ends_a_filling(self, place: Place) -> None:
        """Another session's call changes nothing."""
        refs = reserved(place.first, place.prompt[:1])
        with pytest.raises(StaleSlot):
            place.second.commit(refs, ())
        with pytest.raises(StaleSlot):
            place.second.abort(refs, sealed=False)
        assert place.first.commit(refs, ()) == 1

    def test_a_sealed_slot_is_reused_only_when_it_was_unsealed(self, place: Place) -> None:
        """Late copies land on memory that is nobody's."""
        refs = reserved(place.first, place.prompt)
        place.first.abort(refs, sealed=True)
        assert place.second.reserve([page(99)], parent=None) is None
        place.first.unseal(refs[:1])
        assert place.second.reserve([page(99)], parent=None) is not None

    def test_a_doubted_page_is_not_found_and_can_be_stored_again(self, place: Place) -> None:
        """No request fails twice on one record."""
        store(place.first, place.prompt[:2])
        place.second.doubt(place.prompt[1:2])
        assert place.first.lookup(place.prompt).best == 1
        store(place.first, place.prompt[1:2])
        assert place.first.lookup(place.prompt).best == 2

    def test_closing_a_session_gives_back_all_that_it_held(self, place: Place) -> None:
        """Leases, fillings and seals; closing twice does nothing."""
        store(place.first, place.prompt[:1])
        assert place.second.lookup(place.prompt).lease is not None
        refs = reserved(place.second, place.prompt[1:])
        place.second.abort(refs[:1], sealed=True)
        place.second.close()
        place.second.close()
        others = [page(100 + number) for number in range(place.num_slots)]
        assert place.first.reserve(others, parent=None) is not None
        with pytest.raises(SessionEnded):
            place.second.lookup(place.prompt)
