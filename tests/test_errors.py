"""Every error says three things, and says them on the other side of a process boundary too."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator

import pytest

from rayhicache.errors import LoadFailed, RayHiCacheError

# Faults of rooms that other rooms raise are in errors.py; these are the actors' own.
ROOMS = ("rayhicache.errors", "rayhicache.actors.calls")


def kinds(base: type[RayHiCacheError] = RayHiCacheError) -> Iterator[type[RayHiCacheError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


for room in ROOMS:
    importlib.import_module(room)
KINDS = sorted(set(kinds()), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_after_pickling(kind: type[RayHiCacheError]) -> None:
    error = kind(asked="do it", found="it can't be", remedy="don't", requests=("r1",), number=7)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.asked, again.found, again.remedy) == ("do it", "it can't be", "don't")
    assert again.details == {"requests": ("r1",), "number": 7}
    assert str(again) == str(error) == "do it: it can't be. don't"


def test_there_are_errors_to_test() -> None:
    assert len(KINDS) > 30


def test_an_error_that_misses_a_sentence_can_not_be_made() -> None:
    with pytest.raises(TypeError):
        RayHiCacheError(asked="a", found="b")  # type: ignore[call-arg]  # that is the test


def test_a_failed_load_names_its_requests_and_tickets() -> None:
    error = LoadFailed(asked="a", found="b", remedy="c", requests=("r1",), tickets=(3,))
    assert (error.requests, error.tickets) == (("r1",), (3,))
