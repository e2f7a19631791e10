"""Ranks in processes of their own: the same bytes, and what the death of one of them does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from device.peer_ranks import SLOTS, Process, shared_folder

Start = Callable[[int], list[Process]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start so many connected ranks."""
    ranks: list[Process] = []

    def begin(count: int) -> list[Process]:
        ranks.extend(Process(folder, rank, count) for rank in range(count))
        ranks[0].call("fill_records", list(range(SLOTS)))
        for rank in ranks:
            rank.begin("connect")
        assert all(rank.answer() for rank in ranks)
        return ranks

    with shared_folder() as folder:
        yield begin
        for rank in ranks:
            rank.end()


def _all(ranks: list[Process], slots: list[int]) -> list[str]:
    for rank in ranks:
        rank.begin("restore", slots)
    return [rank.answer() for rank in ranks]


def test_processes_restore_together_and_go_on_alone_when_one_is_killed(start: Start) -> None:
    first, second, third = ranks = start(3)
    assert _all(ranks, [7, 2, 9]) == [""] * 3
    third.call("hold_side")
    for rank in ranks:
        rank.call("start", [1, 4, 6])
    # The third has enqueued everything, and nothing of it runs: the others wait for its part.
    assert third.call("wait_side", 6)
    third.kill()
    for rank in (first, second):
        done, cause = rank.call("ended")
        assert not done
        assert "rank 2 has ended" in cause
    assert _all([first, second], [3, 5]) == ["rank 2 has ended"] * 2


def test_a_rank_that_dies_before_it_comes_costs_the_others_nothing(start: Start) -> None:
    first, second = start(2)
    first.call("start", [1, 4])
    second.kill()
    assert first.call("ended") == (True, "")
    first.call("check", [1, 4])


def test_a_store_is_whole_when_it_is_done_on_any_rank(start: Start) -> None:
    ranks = start(2)
    for rank in ranks:
        rank.begin("store_and_check", [3, 8, 1])
    for rank in ranks:
        rank.answer()
