"""Leases of a process over restarts of the owner: none is lost, and none stays behind."""

from __future__ import annotations

from rayhicache.memory.open_leases import OpenLeases

LIFE = 1 << 32


def lease(life: int, number: int) -> int:
    return life * LIFE + number


def opened(*numbers: int) -> OpenLeases:
    leases = OpenLeases()
    for number in numbers:
        leases.granted(number)
    return leases


def test_a_lease_is_released_at_the_owner_by_its_own_id() -> None:
    assert opened(lease(1, 1), lease(1, 2)).released(lease(1, 1)) == lease(1, 1)


def test_the_cover_is_released_with_the_last_lease_that_it_stands_for() -> None:
    leases = opened(lease(1, 1), lease(1, 2))
    assert leases.recovered(lease(2, 9), first_lease=2 * LIFE) is None
    assert leases.released(lease(1, 1)) is None
    assert leases.released(lease(1, 2)) == lease(2, 9)


def test_a_cover_that_stands_for_nothing_is_released_at_once() -> None:
    """The lease was released after the port had named its slots, before the owner's answer."""
    leases = opened(lease(1, 1))
    assert leases.released(lease(1, 1)) == lease(1, 1)
    assert leases.recovered(lease(2, 9), first_lease=2 * LIFE) == lease(2, 9)
    assert opened().recovered(None, first_lease=2 * LIFE) is None


def test_a_lease_of_the_new_life_is_not_covered() -> None:
    """It was granted between the re-attachment and its answer, and has an end of its own."""
    leases = opened(lease(1, 1), lease(2, 1))
    assert leases.recovered(lease(2, 9), first_lease=2 * LIFE) is None
    assert leases.released(lease(2, 1)) == lease(2, 1)
    assert leases.released(lease(1, 1)) == lease(2, 9)


def test_over_two_restarts_only_the_last_cover_is_released() -> None:
    """The first one ended with its life."""
    leases = opened(lease(1, 1))
    leases.recovered(lease(2, 9), first_lease=2 * LIFE)
    leases.granted(lease(2, 10))
    leases.recovered(lease(3, 9), first_lease=3 * LIFE)
    assert leases.released(lease(1, 1)) is None
    assert leases.released(lease(2, 10)) == lease(3, 9)
