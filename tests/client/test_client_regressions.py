"""What went wrong elsewhere, as rules of the client."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from owners import local_owner
from rayhicache.core.keys import InputSpan
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.protocols import Direction
from rayhicache.errors import (
    LayoutMismatch,
    LoadFailed,
)
from rayhicache.memory.owner import ArenaOwner
from rayhicache.requests import ModelIdentity
from rayhicache.testing import poison
from rayhicache.testing.faults import FailingDevice, HoldingDevice
from workers import (
    BLOCK,
    IDENTITY,
    LAYERS,
    NUM_BLOCKS,
    PAGE,
    SECONDS,
    MakeWorker,
    SteppedDevice,
    Worker,
    prompt,
)

# ── R11, R15, R16, R17 ──────────────────────────────────────────────────────────────────────────


def test_a_store_reads_only_after_what_was_running_and_before_its_blocks_are_reused(
    worker: MakeWorker,
) -> None:
    """R11."""
    one = worker(num_blocks=PAGE // BLOCK)
    assert isinstance(one.device, CpuDevice)
    compute = one.device.new_stream("compute")
    compute.pause()
    blocks = one.take(PAGE)
    with one.device.use(compute):
        compute.enqueue(lambda: one.compute(prompt(1, PAGE), blocks))
        ticket = one.client.store("s", one.client.prompt(prompt(1, PAGE)), blocks, stop=PAGE)
        one.pools.free(blocks)
    assert one.port.wait_for("reserve")
    assert one.pools.allocate(1) is None
    compute.resume()
    outcome = ticket.result(SECONDS)
    assert outcome is not None
    assert outcome.done
    assert one.pools.allocator.num_free() == PAGE // BLOCK
    poison.poison(one.memories)
    assert one.restore([*prompt(1, PAGE), 7]) == PAGE


def test_a_write_into_blocks_that_a_store_reads_comes_after_it(worker: MakeWorker) -> None:
    """R11."""
    device = HoldingDevice(CpuDevice(), {"kv"}, direction=Direction.STORE)
    one = worker(device=device)
    compute = device.new_stream("compute")
    blocks = one.take(PAGE)
    one.compute(prompt(1, PAGE), blocks)
    ticket = one.client.store("s", one.client.prompt(prompt(1, PAGE)), blocks, stop=PAGE)
    with device.use(compute), one.pools.reading(blocks, writes=blocks):
        one.pools.pool("kv")._writable(0)
        compute.enqueue(lambda: poison.poison(one.memories, blocks))
    device.release()
    assert ticket.result(SECONDS) is not None
    assert compute.synchronize(SECONDS)
    one.pools.free(blocks)
    assert one.restore([*prompt(1, PAGE), 7]) == PAGE


def test_without_further_traffic_a_load_ends_its_lease_and_a_store_is_committed(
    worker: MakeWorker, owner: ArenaOwner
) -> None:
    """R15. Nobody asks for the tickets."""
    one = worker()
    blocks = one.take(PAGE)
    one.compute(prompt(1, PAGE), blocks)
    one.client.store("s", one.client.prompt(prompt(1, PAGE)), blocks, stop=PAGE)
    assert one.port.wait_for("commit")
    one.pools.free(blocks)
    blocks = one.take(PAGE)
    one.load(one.lookup([*prompt(1, PAGE), 7]), blocks)
    assert one.port.wait_for("release")
    assert owner.stats().leases == 0
    one.client.close(SECONDS)
    one.pools.free(blocks)


@pytest.mark.parametrize("stop", range(len(LAYERS)))
def test_a_load_given_up_at_any_layer_gives_everything_back(
    worker: MakeWorker, owner: ArenaOwner, stop: int
) -> None:
    """R16."""
    device = SteppedDevice(Direction.LOAD, stop)
    one = worker(device=device)
    one.store(prompt(1, 2 * PAGE))
    blocks = one.take(2 * PAGE)
    ticket = one.load(one.lookup([*prompt(1, 2 * PAGE), 7]), blocks)
    assert device.reached.wait(SECONDS)
    ticket.cancel()
    one.pools.free(blocks)
    assert one.pools.allocator.num_free() == NUM_BLOCKS - len(blocks)
    assert owner.stats().leases == 1
    device.go.set()
    outcome = ticket.result(SECONDS)
    assert (outcome.done, outcome.cause) == (False, "cancelled")
    one.check()
    assert owner.stats().leases == 0
    # A load that its caller gave up says nothing about the records.
    assert one.hits([*prompt(1, 2 * PAGE), 7]) == 2 * PAGE


@pytest.mark.parametrize("stop", range(len(LAYERS)))
def test_a_store_given_up_at_any_layer_gives_everything_back(
    worker: MakeWorker, owner: ArenaOwner, stop: int
) -> None:
    """R16."""
    device = SteppedDevice(Direction.STORE, stop)
    one = worker(device=device)
    blocks = one.take(2 * PAGE)
    one.compute(prompt(1, 2 * PAGE), blocks)
    ticket = one.client.store("s", one.client.prompt(prompt(1, 2 * PAGE)), blocks, stop=2 * PAGE)
    assert device.reached.wait(SECONDS)
    before = owner.stats()
    assert before.filling == 2
    ticket.cancel()
    one.pools.free(blocks)
    device.go.set()
    assert ticket.result(SECONDS) is not None
    one.check()
    stats = owner.stats()
    assert (stats.free, stats.filling, stats.sealed, stats.ready) == (stats.slots, 0, 0, 0)
    assert one.hits([*prompt(1, 2 * PAGE), 7]) == 0


def test_what_is_found_and_not_loaded_is_released_once(
    worker: MakeWorker, owner: ArenaOwner
) -> None:
    """R16."""
    one = worker()
    one.store(prompt(1, PAGE))
    found = one.lookup([*prompt(1, PAGE), 7])
    assert owner.stats().leases == 1
    one.client.release(found)
    one.client.release(found)
    assert owner.stats().leases == 0
    assert one.port.calls["release"] == 1


def test_steps_without_a_load_call_nobody(worker: MakeWorker) -> None:
    """R17. A miss costs one lookup, and from then on the steps are the engine's own."""
    one = worker()
    assert one.lookup(prompt(1, 2 * PAGE)).tokens == 0
    blocks = one.take(2 * PAGE)
    before = one.port.calls.copy()
    for _ in range(10):
        with one.pools.reading(blocks, writes=blocks[-1:]):
            for layer_id in LAYERS:
                one.pools.pool("kv")._writable(layer_id)
                one.pool.get_kv_buffer(layer_id)
                one.pool.get_index_k_with_scale_buffer(layer_id)
    one.pools.free(blocks)
    assert one.port.calls == before == {"attach": 1, "lookup": 1}


def test_only_lookup_calls_the_owner_on_the_engines_thread(worker: MakeWorker) -> None:
    """R17. Reserving, committing and releasing are done beside the engine."""
    one = worker()
    one.store(prompt(1, PAGE))
    assert one.restore([*prompt(1, PAGE), 7]) == PAGE
    mine = one.port.threads[threading.current_thread().name]
    assert mine == one.port.calls["attach"] + one.port.calls["lookup"] == 2
    assert one.port.calls["reserve"] == one.port.calls["commit"] == one.port.calls["release"] == 1


# ── R18 ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelIdentity)])
def test_another_model_never_hits(worker: MakeWorker, field: str) -> None:
    """R18."""
    tokens = prompt(1, PAGE + 1)
    worker().store(tokens)
    other = 1 if field == "weights_version" else "another"
    changed: dict[str, Any] = {field: other}
    two = worker(identity=dataclasses.replace(IDENTITY, **changed))
    assert two.hits(tokens) == 0
    assert worker().hits(tokens) == PAGE


@pytest.mark.parametrize(
    "how",
    [
        {"adapter": "lora"},
        {"salt": "tenant"},
        {"adapter": "ab", "salt": "c"},
        {"adapter": "a", "salt": "bc"},
        {"inputs": [InputSpan(start=3, stop=5, digest=b"cat")]},
        {"inputs": [InputSpan(start=3, stop=5, digest=b"dog")]},
    ],
)
def test_another_adapter_salt_or_image_never_hits(worker: MakeWorker, how: dict[str, Any]) -> None:
    """R18, R32."""
    one, tokens = worker(), prompt(1, PAGE + 1)
    one.store(tokens)
    one.store(tokens, adapter="abc")
    one.store(tokens, salt="abc")
    assert one.hits(tokens, **how) == 0
    one.store(tokens, **how)
    assert one.hits(tokens, **how) == PAGE


@pytest.mark.parametrize("other", [{"page_tokens": 32}, {"row_dim": 16}])
def test_another_page_size_or_layout_has_other_keys_and_is_refused_at_attach(
    worker: MakeWorker, owner: ArenaOwner, other: dict[str, Any]
) -> None:
    """R18, R27."""
    one = worker()
    with pytest.raises(LayoutMismatch):
        Worker(owner, **other)
    with local_owner(4 << 20) as elsewhere:
        two = worker(owner=elsewhere, **other)
        tokens = prompt(1, 4 * PAGE)
        assert set(one.client.prompt(tokens).keys).isdisjoint(two.client.prompt(tokens).keys)
        two.close()


# ── R33, R34, R35, R36 ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("final", "stored"), [(PAGE - 1, 0), (PAGE, 1), (2 * PAGE - 1, 1)])
def test_tokens_that_are_not_final_are_never_stored(
    worker: MakeWorker, owner: ArenaOwner, final: int, stored: int
) -> None:
    """R33. The prompt goes on with tokens that a draft proposed."""
    one = worker()
    one.store(prompt(1, 2 * PAGE + 5), stop=final)
    assert owner.stats().ready == stored
    assert one.hits(prompt(1, 2 * PAGE + 5)) == stored * PAGE


def test_a_fully_cached_prompt_computes_its_last_token_and_touches_no_shared_page(
    worker: MakeWorker, owner: ArenaOwner
) -> None:
    """R34."""
    one, tokens = worker(), prompt(1, 2 * PAGE)
    shared = one.take(2 * PAGE)  # blocks of another request with the same prompt
    one.compute(tokens, shared)
    whole = one.client.prompt(tokens)
    first = one.client.store("a", whole, shared, stop=2 * PAGE)
    assert first.result(SECONDS) is not None
    found = one.client.lookup(whole)
    assert found.tokens == 2 * PAGE - BLOCK
    blocks = one.take(2 * PAGE)
    ticket = one.load(found, blocks[:-1])
    with one.pools.reading(blocks, writes=blocks[-1:]):
        one.read(blocks)
    poison.poison(one.memories, blocks[-1:])  # what this request computes, rounded its own way
    assert ticket.result(SECONDS).done
    again = one.client.store("b", whole, blocks, stop=2 * PAGE)
    assert again.result(SECONDS) is not None
    one.expect(tokens, blocks[:-1])
    one.expect(tokens, shared)
    one.pools.free([*blocks, *shared])
    assert owner.stats().stored_pages == 2
    assert one.restore([*tokens, 7]) == 2 * PAGE


@pytest.mark.parametrize(
    ("length", "hit"),
    [
        (PAGE, PAGE - BLOCK),
        (PAGE + 1, PAGE),
        (2 * PAGE, 2 * PAGE - BLOCK),
        (2 * PAGE + 1, 2 * PAGE),
    ],
)
def test_a_hit_may_end_inside_a_page_and_is_exact(
    worker: MakeWorker, length: int, hit: int
) -> None:
    """R35. Blocks of 16 under pages of 64; a whole page in the tier serves a part of it."""
    one = worker()
    one.store(prompt(1, 2 * PAGE))
    assert one.restore(prompt(1, length)) == hit


@pytest.mark.parametrize("skip", range(0, 2 * PAGE, BLOCK))
def test_what_the_engine_has_already_is_skipped_in_whole_blocks(
    worker: MakeWorker, skip: int
) -> None:
    """R35."""
    one, tokens = worker(), prompt(1, 2 * PAGE + 1)
    one.store(tokens)
    blocks = one.take(2 * PAGE)
    poison.poison(one.memories)
    rest = blocks[skip // BLOCK :]
    ticket = one.load(one.lookup(tokens), rest, skip_tokens=skip)
    assert ticket.result(SECONDS).done
    one.compute(tokens, blocks[: skip // BLOCK])
    one.expect(tokens, blocks)
    one.pools.free(blocks)


@pytest.mark.parametrize("layer", LAYERS)
def test_after_a_failed_load_the_lookup_misses_and_the_request_ends(
    worker: MakeWorker, owner: ArenaOwner, layer: int
) -> None:
    """R36."""
    one = worker(device=FailingDevice.at(CpuDevice(), Direction.LOAD, layer))
    tokens = prompt(1, 2 * PAGE + 1)
    one.store(tokens)
    blocks = one.take(2 * PAGE)
    ticket = one.load(one.lookup(tokens), blocks)
    with pytest.raises(LoadFailed) as failed:
        one.read(blocks)
    assert failed.value.requests == ("l",)
    assert ticket.result(SECONDS) is not None
    assert one.hits(tokens) == 0
    assert owner.stats().leases == 0
    one.pools.free(blocks)
    one.store(tokens)  # computed again, and stored anew
    assert worker().restore(tokens) == 2 * PAGE
