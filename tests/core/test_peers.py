"""What ranks agree on: shares, the places of words, and what is made of what they see."""

from __future__ import annotations

import itertools

import pytest

from rayhicache.core.peers import (
    OUTCOMES,
    RECORDS,
    RELEASED,
    BoardShape,
    Sight,
    Way,
    outcome_of,
    plan_digest,
    pushed_of,
    share_of,
    sight_of,
    way_of,
    why_not_whole,
)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 512, 2001])
def test_shares_are_all_rows_once_and_of_even_size(count: int, num_ranks: int) -> None:
    shares = [share_of(count, rank, num_ranks) for rank in range(num_ranks)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_no_two_words_of_a_board_share_a_byte(num_ranks: int) -> None:
    shape = BoardShape(num_ranks=num_ranks, steps=3, indices_max=5)
    ranks = range(num_ranks)
    narrow, wide = [], [shape.fingerprint(rank) for rank in ranks]
    wide += [at for rank in ranks for at in (shape.verdict(rank), shape.left(rank))]
    for lane, rank in itertools.product(range(2), ranks):
        narrow.append(shape.free(lane, rank))
        wide += [shape.begun(lane, rank), shape.granted(lane, rank), shape.pushed(lane, rank)]
        wide += [shape.outcome(lane, rank, number) for number in range(OUTCOMES)]
        for other in ranks:
            narrow.append(shape.closed(lane, rank, other))
            narrow += [shape.ready(lane, rank, other, step) for step in range(3)]
    runs = [(at, 4) for at in narrow] + [(at, 8) for at in wide]
    runs += [
        (shape.record(lane, rank, at), shape.record_bytes)
        for lane, rank, at in itertools.product(range(2), ranks, range(RECORDS))
    ]
    taken = [byte for start, nbytes in runs for byte in range(start, start + nbytes)]
    assert len(taken) == len(set(taken))
    assert max(taken) < shape.nbytes
    assert all(at % nbytes == 0 for at, nbytes in runs[: len(narrow) + len(wide)])
    streams = range(shape.stream_start, shape.stream_start + shape.stream_bytes)
    assert all(at in streams for at in narrow)
    assert not any(at in streams for at in wide)


def test_a_dead_rank_is_released_from_every_word_that_is_waited_for() -> None:
    shape = BoardShape(num_ranks=3, steps=2, indices_max=1)
    found = shape.waited_for(1, 0)
    for lane in range(2):
        assert shape.free(lane, 1) in found
        assert shape.closed(lane, 1, 0) in found
        assert {shape.ready(lane, 1, 0, step) for step in range(2)} <= set(found)
    assert not set(found) & set(shape.waited_for(2, 0))


def test_a_digest_tells_lanes_pools_and_rows_apart() -> None:
    plans = [
        (0, [("kv", b"12"), ("index", b"3")]),
        (1, [("kv", b"12"), ("index", b"3")]),
        (0, [("kv", b"1"), ("index", b"23")]),
        (0, [("index", b"3"), ("kv", b"12")]),
        (0, [("kv1", b"2"), ("index", b"3")]),
    ]
    assert len({plan_digest(lane, pools) for lane, pools in plans}) == len(plans)
    assert plan_digest(*plans[0]) == plan_digest(*plans[0])


def test_what_is_seen_of_a_peer() -> None:
    assert sight_of(5, 4, gone=False, digest=None, own=1) is Sight.BEHIND
    assert sight_of(5, 5, gone=False, digest=None, own=1) is Sight.BEHIND
    assert sight_of(5, 5, gone=False, digest=1, own=1) is Sight.HERE
    assert sight_of(5, 5, gone=False, digest=2, own=1) is Sight.DIFFERENT
    assert sight_of(5, 6, gone=False, digest=None, own=1) is Sight.AHEAD
    assert sight_of(5, 5, gone=True, digest=1, own=1) is Sight.GONE


@pytest.mark.parametrize("sights", list(itertools.product(Sight, repeat=3)))
def test_ranks_move_together_only_if_all_are_here(sights: tuple[Sight, ...]) -> None:
    way = way_of(sights)
    assert (way is Way.TOGETHER) == (set(sights) == {Sight.HERE})
    assert (way is Way.MISMATCH) == (Sight.DIFFERENT in sights)
    if way is Way.WAIT:
        assert set(sights) <= {Sight.HERE, Sight.BEHIND}


def test_words_only_grow() -> None:
    values = [pushed_of(number, steps) for number in (1, 2, 3) for steps in (0, 1, 156)]
    assert values == sorted(values)
    ends = [outcome_of(number, whole=whole) for number in (1, 2) for whole in (True, False)]
    assert ends == sorted(set(ends))


def test_a_transfer_is_whole_only_by_the_peers_own_words() -> None:
    whole, given_up = outcome_of(7, whole=True), outcome_of(7, whole=False)
    assert why_not_whole(7, 1, closed=7, outcome=whole) == ""
    assert why_not_whole(7, 1, closed=8, outcome=whole) == ""
    assert "gave" in why_not_whole(7, 1, closed=7, outcome=given_up)
    assert "ended" in why_not_whole(7, 1, closed=RELEASED, outcome=whole)
