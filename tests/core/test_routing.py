"""The longest prefix wins until its queue costs more than it saves."""

from __future__ import annotations

from itertools import permutations

from rayhicache.core.routing import Costs, WorkerView, route

COSTS = Costs()


def worker(name: str, *, queued: int = 0, local: int = 0, remote: int = 0) -> WorkerView:
    return WorkerView(id=name, queued_tokens=queued, local_tokens=local, remote_tokens=remote)


def test_the_longest_restorable_prefix_wins() -> None:
    workers = [worker("a", local=64), worker("b", local=512), worker("c")]
    assert route(1000, workers, COSTS) == "b"


def test_a_queue_longer_than_the_prefix_saves_sends_the_prompt_to_a_node_that_pulls() -> None:
    """The spill rule: 512 tokens here save 0.08 x 512 = 40.96 over pulling them."""
    spill = worker("b", remote=512)
    assert route(1000, [worker("a", queued=40, local=512), spill], COSTS) == "a"
    assert route(1000, [worker("a", queued=42, local=512), spill], COSTS) == "b"


def test_without_a_way_to_pull_the_prefix_is_worth_a_longer_queue() -> None:
    cold = worker("b")
    assert route(1000, [worker("a", queued=501, local=512), cold], COSTS) == "a"
    assert route(1000, [worker("a", queued=502, local=512), cold], COSTS) == "b"


def test_ties_go_to_the_shorter_queue_then_to_the_first_name_in_whatever_order() -> None:
    workers = [worker("b"), worker("a"), worker("c")]
    assert {route(10, list(order), COSTS) for order in permutations(workers)} == {"a"}
    free = Costs(compute=0.0, local=0.0, remote=0.0)
    assert route(10, [worker("a", queued=5), worker("b", queued=1)], free) == "b"


def test_nothing_is_routed_to_a_worker_that_has_not_registered() -> None:
    """R37: the router knows only what it is passed, so a hint can't name another."""
    assert route(10, [], COSTS) is None
    for known in (["a"], ["b", "c"]):
        assert route(10, [worker(name, local=10) for name in known], COSTS) in known


def test_a_prefix_longer_than_the_prompt_makes_no_time_negative() -> None:
    assert route(10, [worker("a", local=100), worker("b", local=10)], COSTS) == "b"
