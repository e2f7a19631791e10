"""A peer that failed is left alone for a while, longer each time."""

from __future__ import annotations

from rayhicache.transport.breaker import FIRST_SECONDS, LONGEST_SECONDS, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_peer_is_left_alone_after_a_fault_and_tried_again_later() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert breaker.allows("a")
    breaker.failed("a")
    assert not breaker.allows("a")
    assert breaker.allows("b")
    clock.now = FIRST_SECONDS
    assert breaker.allows("a")


def test_each_further_fault_doubles_the_pause_up_to_the_longest() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    pause = FIRST_SECONDS
    while pause < LONGEST_SECONDS:
        breaker.failed("a")
        clock.now += pause * 0.99
        assert not breaker.allows("a")
        clock.now += pause * 0.01
        assert breaker.allows("a")
        pause *= 2
    for _ in range(3):
        breaker.failed("a")
        clock.now += LONGEST_SECONDS
        assert breaker.allows("a")


def test_one_answer_makes_a_peer_as_good_as_new() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(4):
        breaker.failed("a")
    breaker.worked("a")
    assert breaker.allows("a")
    breaker.failed("a")
    clock.now = FIRST_SECONDS
    assert breaker.allows("a")


def test_a_clock_that_starts_below_zero_allows_a_peer_that_never_failed() -> None:
    clock = Clock()
    clock.now = -5.0
    assert Breaker(clock).allows("a")
