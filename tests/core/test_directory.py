"""A directory is a hint: it follows what pools announce, and asks for the whole when in doubt."""

from __future__ import annotations

from rayhicache.core.directory import Announcement, DirectoryTable
from rayhicache.core.keys import PageKey
from tiers import keys


def told(
    seat: str,
    *,
    stored: list[PageKey] | None = None,
    removed: list[PageKey] | None = None,
    epoch: int = 1,
    whole: bool = False,
) -> Announcement:
    return Announcement(
        seat=seat,
        epoch=epoch,
        whole=whole,
        stored=tuple(stored or ()),
        removed=tuple(removed or ()),
    )


def table_of(**seats: list[PageKey]) -> DirectoryTable:
    table = DirectoryTable()
    for seat, stored in seats.items():
        assert table.announce(told(seat, stored=stored, whole=True))
    return table


def test_each_seat_is_told_with_the_leading_pages_that_it_has() -> None:
    table = table_of(a=keys(1, 2, 3), b=keys(1, 2), c=keys(2, 3))
    assert table.counts(keys(1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert table.counts(keys(4)) == {}
    assert table.counts([]) == {}
    table.check()


def test_a_page_that_comes_back_in_one_message_is_there() -> None:
    table = table_of(a=keys(1))
    assert table.announce(told("a", stored=keys(1), removed=keys(1, 9)))
    assert table.counts(keys(1)) == {"a": 1}
    assert table.announce(told("a", removed=keys(1)))
    assert table.counts(keys(1)) == {}
    table.check()


def test_a_seat_that_is_unknown_has_to_tell_all_that_it_has() -> None:
    table = DirectoryTable()
    assert not table.announce(told("a", stored=keys(1)))
    assert table.counts(keys(1)) == {}
    assert table.announce(told("a", stored=keys(1, 2), whole=True))
    assert table.counts(keys(1, 2)) == {"a": 2}


def test_a_new_life_of_a_pool_forgets_what_the_earlier_one_told() -> None:
    table = table_of(a=keys(1, 2))
    assert not table.announce(told("a", stored=keys(3), epoch=2))
    assert table.counts(keys(1)) == {}
    assert table.announce(told("a", stored=keys(1), epoch=2, whole=True))
    assert table.announce(told("a", stored=keys(2), epoch=1))
    assert table.counts(keys(1, 2)) == {"a": 1}
    table.check()


def test_a_whole_message_replaces_everything_and_forgetting_leaves_nothing() -> None:
    table = table_of(a=keys(1, 2), b=keys(1))
    table.announce(told("a", stored=keys(1), whole=True))
    assert table.counts(keys(1, 2)) == {"a": 1, "b": 1}
    table.forget("a")
    table.forget("nobody")
    table.check()
    assert table.counts(keys(1)) == {"b": 1}
    assert not table.announce(told("a", stored=keys(2)))
