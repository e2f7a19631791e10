from __future__ import annotations

from typing import Any

import pytest

from owners import local_owner
from rayhicache.client import OWNER_FAULTS
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Direction
from rayhicache.errors import (
    InvalidRequest,
    RayHiCacheError,
    TierClosed,
)
from rayhicache.memory.owner import ArenaOwner
from rayhicache.requests import Load
from rayhicache.testing.faults import HoldingDevice
from workers import (
    BLOCK,
    PAGE,
    SECONDS,
    MakeWorker,
    Worker,
    prompt,
)

# ── hit and miss ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE])
def test_what_was_never_stored_is_a_miss_with_nothing_to_release(
    worker: MakeWorker, owner: ArenaOwner, length: int
) -> None:
    one = worker()
    found = one.lookup(prompt(1, length))
    assert (found.tokens, found.lengths, found.hit.lease) == (0, (), None)
    one.client.release(found)
    assert owner.stats().leases == 0


def test_another_worker_restores_what_one_has_stored(worker: MakeWorker) -> None:
    worker().store(prompt(1, 3 * PAGE))
    assert worker().restore([*prompt(1, 3 * PAGE), 7]) == 3 * PAGE


def test_prompts_share_their_prefix_and_nothing_behind_it(worker: MakeWorker) -> None:
    one = worker()
    one.store(prompt(1, 2 * PAGE))
    one.store([*prompt(1, PAGE), *prompt(2, PAGE)])
    assert one.hits([*prompt(1, PAGE), *prompt(3, 2 * PAGE)]) == PAGE
    assert one.restore([*prompt(1, PAGE), *prompt(2, PAGE), 7]) == 2 * PAGE


def test_a_batch_is_loaded_by_one_ticket_that_ends_all_its_leases(
    worker: MakeWorker, owner: ArenaOwner
) -> None:
    one = worker()
    prompts = [[*prompt(number, PAGE), 7] for number in (1, 2)]
    for tokens in prompts:
        one.store(tokens)
    loads = [one.lookup(tokens) for tokens in prompts]
    blocks = [one.take(PAGE) for _ in prompts]
    assert owner.stats().leases == 2
    ticket = one.client.load(
        [
            Load(id=str(at), found=found, blocks=mine)
            for at, (found, mine) in enumerate(zip(loads, blocks, strict=True))
        ]
    )
    assert ticket.requests == ("0", "1")
    assert ticket.result(SECONDS) is not None
    for tokens, mine in zip(prompts, blocks, strict=True):
        one.expect(tokens, mine)
        one.pools.free(mine)
    assert owner.stats().leases == 0


# ── single flight ───────────────────────────────────────────────────────────────────────────────


def test_a_page_that_is_there_is_not_copied_again(worker: MakeWorker, owner: ArenaOwner) -> None:
    one = worker()
    one.store(prompt(1, PAGE))
    blocks = one.take(PAGE)  # poison: were it copied, the record would hold poison
    ticket = one.client.store("s", one.client.prompt(prompt(1, PAGE)), blocks, stop=PAGE)
    assert ticket.result(SECONDS) is not None
    one.pools.free(blocks)
    assert owner.stats().stored_pages == 1
    assert one.port.calls["commit"] == 1
    assert one.restore([*prompt(1, PAGE), 7]) == PAGE


def test_a_page_that_another_fills_is_not_filled_twice(
    worker: MakeWorker, owner: ArenaOwner
) -> None:
    device = HoldingDevice(CpuDevice(), {"kv"}, direction=Direction.STORE)
    first, second = worker(device=device), worker()
    blocks = first.take(PAGE)
    first.compute(prompt(1, PAGE), blocks)
    ticket = first.client.store("s", first.client.prompt(prompt(1, PAGE)), blocks, stop=PAGE)
    assert first.port.wait_for("reserve")
    second.store(prompt(1, 2 * PAGE))
    assert (owner.stats().filling, owner.stats().ready) == (1, 1)
    # Page 1 is there, but the prefix isn't before page 0 is.
    assert second.hits([*prompt(1, 2 * PAGE), 7]) == 0
    device.release()
    assert ticket.result(SECONDS) is not None
    first.pools.free(blocks)
    assert second.restore([*prompt(1, 2 * PAGE), 7]) == 2 * PAGE
    assert owner.stats().stored_pages == 2


def test_an_arena_without_room_stores_nothing_and_says_nothing(worker: MakeWorker) -> None:
    with local_owner(300 << 10) as small:
        one = worker(owner=small)
        room = small.stats().slots
        assert room < 30
        held = []
        for number in range(room):
            one.store(prompt(number, PAGE))
            held.append(one.lookup([*prompt(number, PAGE), 7]))
        one.store(prompt(room, PAGE))
        assert one.hits([*prompt(room, PAGE), 7]) == 0
        for found in held:
            one.client.release(found)
        one.close()


# ── an owner that fails, bad input, the end ─────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", OWNER_FAULTS)
@pytest.mark.parametrize("call", ["lookup", "reserve", "commit", "release"])
def test_a_fault_of_the_owner_is_a_miss(
    owner: ArenaOwner, call: str, kind: type[RayHiCacheError]
) -> None:
    one = Worker(owner)
    tokens = prompt(1, PAGE + 1)
    one.port.faults[call] = kind(asked="ask the owner", found="it is gone", remedy="go on")
    one.store(tokens)
    hit = one.restore(tokens) if call in ("lookup", "release") else one.hits(tokens)
    assert hit == (PAGE if call == "release" else 0)
    one.close()
    one.check()


def test_a_fault_that_is_not_the_owners_is_not_hidden(worker: MakeWorker) -> None:
    one = worker()
    one.port.faults["lookup"] = InvalidRequest(asked="a", found="b", remedy="c")
    with pytest.raises(InvalidRequest):
        one.lookup(prompt(1, PAGE + 1))


@pytest.mark.parametrize(
    ("blocks", "skip"), [(PAGE // BLOCK + 1, 0), (PAGE // BLOCK, BLOCK), (1, 3)]
)
def test_more_than_was_found_is_refused_and_the_lease_kept(
    worker: MakeWorker, owner: ArenaOwner, blocks: int, skip: int
) -> None:
    one, tokens = worker(), prompt(1, PAGE + 1)
    one.store(tokens)
    found = one.lookup(tokens)
    with pytest.raises(InvalidRequest):
        one.load(found, list(range(blocks)), skip_tokens=skip)
    assert owner.stats().leases == 1
    one.client.release(found)


def test_a_miss_cannot_be_loaded(worker: MakeWorker) -> None:
    one = worker()
    with pytest.raises(InvalidRequest):
        one.load(one.lookup(prompt(1, PAGE + 1)), [0])


@pytest.mark.parametrize(
    "where", [{"start": 3, "stop": PAGE}, {"stop": PAGE + 2}, {"stop": PAGE, "blocks": [0]}]
)
def test_a_store_that_does_not_fit_is_refused(worker: MakeWorker, where: dict[str, Any]) -> None:
    one = worker()
    blocks = where.pop("blocks", range(8))
    with pytest.raises(InvalidRequest):
        one.client.store("s", one.client.prompt(prompt(1, PAGE + 1)), blocks, **where)
    assert one.port.calls["reserve"] == 0


def test_close_is_idempotent_and_nothing_is_taken_afterwards(
    owner: ArenaOwner,
) -> None:
    one = Worker(owner)
    tokens = prompt(1, PAGE + 1)
    one.store(tokens)
    found = one.lookup(tokens)
    assert one.client.close()
    assert one.client.close()
    assert one.port.calls["close"] == 1
    assert owner.stats().leases == 0  # ended with the session
    with pytest.raises(TierClosed):
        one.load(found, one.take(PAGE))
    assert one.lookup(tokens).tokens == 0


def test_close_does_not_wait_for_ever_for_a_copy_that_hangs(owner: ArenaOwner) -> None:
    device = HoldingDevice(CpuDevice(), {"kv"})
    one = Worker(owner, device=device)
    tokens = prompt(1, PAGE + 1)
    one.store(tokens)
    blocks = one.take(PAGE)
    ticket = one.load(one.lookup(tokens), blocks)
    assert device.held.wait_pending(1)
    assert not one.client.close(0.05)
    assert owner.stats().leases == 1  # the copy may still read
    device.release()
    assert ticket.result(SECONDS) is not None
    assert owner.stats().leases == 0
    one.port.close()
    device.close()
