"""Ranks that restore and store together: every byte on every rank, and never one early."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from device.peer_ranks import (
    LIMITS,
    PER_PAGE,
    SECONDS,
    SLOTS,
    Rank,
    group_of,
    outcome_of,
    restored,
    shared_folder,
    together,
)
from device.worlds import Barrier, Reader, all_enqueued
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.cpu_peers import CpuPeers
from rayhicache.device.peers import PeerLimits
from rayhicache.device.protocols import Direction, Landing, Stream
from rayhicache.device.space import PoolMemory
from rayhicache.device.staging import StagedPlan
from rayhicache.errors import LoadFailed, PeerMismatch, PeerUnreachable
from rayhicache.testing import poison
from rayhicache.testing.faults import DeviceDecorator, FailingDevice

RESTORED = [7, 2, 9, 0, 5]


class Counting(DeviceDecorator):
    """Counts the rows that it is asked to move."""

    rows = 0

    def copy(self, staged: StagedPlan, stream: Stream) -> Iterator[Landing]:
        self.rows += sum(transfer.count for transfer in staged.transfers)
        return self.inner.copy(staged, stream)


def counting(folder: Path, rank: int, num_ranks: int, **other: Any) -> Rank:
    inner = Counting(CpuDevice(wait_seconds=SECONDS))
    return Rank(folder, rank, num_ranks, inner=inner, connect=False, **other)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_rank_gets_every_byte_and_reads_its_share(num_ranks: int) -> None:
    with group_of(num_ranks, counting) as ranks:
        assert all(
            found in ("", "there is nothing to share") for found in restored(ranks, RESTORED)
        )
        rows = [rank.inner.rows for rank in ranks if isinstance(rank.inner, Counting)]
        assert sum(rows) == 2 * PER_PAGE * len(RESTORED)
        assert max(rows) - min(rows) <= 2


@pytest.mark.parametrize("pages", [1, 2, SLOTS])
def test_any_number_of_pages_is_shared_again_and_again(pages: int) -> None:
    with group_of(3) as ranks:
        for seed in range(4):
            slots = torch.randperm(SLOTS)[:pages].tolist()
            found = restored(ranks, slots, seed=seed)
            assert found == [""] * 3


def test_a_layer_is_read_only_once_the_peer_has_passed_it_on() -> None:
    with group_of(2) as (mine, other):
        other.side().pause()
        blocks = mine.take(2)
        ticket = mine.load(blocks, [1, 4])
        other.load(other.take(2), [1, 4])
        all_enqueued(ticket)
        reader = Reader(mine.inner, lambda: _read(mine, 0, blocks))
        # Its own half has landed; the other's is poison, and the reader waits for it.
        assert mine.side().synchronize(SECONDS)
        half = _rows(mine, 0)[blocks[len(blocks) // 2 :]]
        assert poison.is_poison(half)
        assert not ticket.counter.landed(0, "kv")
        other.side().resume()
        assert torch.equal(reader.value(), _rows(mine, 0)[blocks])
        assert outcome_of(ticket).done
        mine.expect(blocks, [1, 4])


def test_a_layer_that_the_peer_has_not_enqueued_is_not_told() -> None:
    """R3: nobody waits on a word before its write is enqueued; the reader's thread blocks."""
    barrier = Barrier(2)
    with group_of(2, _held(barrier)) as (mine, other):
        blocks = mine.take(2)
        ticket = mine.load(blocks, [1, 4])
        other.load(other.take(2), [1, 4])
        assert barrier.reached.wait(SECONDS)
        ticket.counter.wait_until(0)
        with ticket.counter._changed:
            assert (2, "kv") in ticket.counter._pending
            assert (2, "kv") not in ticket.counter._recorded
        barrier.open.set()
        assert outcome_of(ticket).done
        mine.expect(blocks, [1, 4])


def test_a_peer_that_never_enqueues_costs_a_recompute_by_the_limit() -> None:
    barrier = Barrier(2)
    limits = replace(LIMITS, push_seconds=0.2)
    with group_of(2, _held(barrier, limits=limits)) as (mine, other):
        blocks = mine.take(2)
        ticket = mine.load(blocks, [1, 4])
        theirs = other.load(other.take(2), [1, 4])
        with pytest.raises(LoadFailed, match="didn't enqueue layer 2"):
            ticket.counter.wait_all()
        # The peer still stands in the middle of it, and will never again write to these blocks.
        assert not outcome_of(ticket).done
        mine.fill_blocks(blocks, [7, 8])
        barrier.open.set()
        assert not outcome_of(theirs).done
        assert other.side().synchronize(SECONDS)
        mine.expect(blocks, [7, 8])
        assert all(restored([mine, other], [3]))


def test_a_load_that_is_given_up_waits_for_what_the_peer_has_enqueued() -> None:
    barrier = Barrier(2)
    limits = replace(LIMITS, push_seconds=0.2)
    with group_of(2, _held(barrier, limits=limits)) as (mine, other):
        other.side().pause()
        blocks = mine.take(2)
        ticket = mine.load(blocks, [1, 4])
        other.load(other.take(2), [1, 4])
        reader = Reader(mine.inner, ticket.counter.wait_all)
        assert ticket.result(0.5) is None
        assert reader.is_alive()
        other.side().resume()
        with pytest.raises(LoadFailed):
            reader.value()
        assert not outcome_of(ticket).done
        mine.fill_blocks(blocks, [7, 8])
        barrier.open.set()
        assert other.side().synchronize(SECONDS)
        mine.expect(blocks, [7, 8])


def test_a_peer_that_never_comes_is_not_waited_for_long() -> None:
    limits = replace(LIMITS, begin_seconds=0.1)
    with group_of(3, _limited(limits)) as ranks:
        found = restored(ranks[:2], RESTORED)
        assert all("other ranks {2: 'behind'}" in why or "gone" in why for why in found)
        # It comes after all, finds the others gone and restores by itself.
        assert "gone" in ranks[2].restore(RESTORED)


def test_a_peers_blocks_are_written_only_behind_its_own_fences() -> None:
    with group_of(2) as (mine, other):
        blocks = other.take(2)
        compute = other.inner.new_stream("compute")
        compute.pause()
        compute.enqueue(lambda: poison.poison(other.memories), "forward")
        with other.inner.use(compute):
            other.pools.free(blocks)
        again = other.take(2)
        assert set(again) == set(blocks)
        theirs = other.load(again, [1, 4])
        ticket = mine.load(mine.take(2), [1, 4])
        assert ticket.result(0.1) is None
        assert poison.is_poison(_rows(other, 0)[again])
        compute.resume()
        assert outcome_of(ticket).done
        assert outcome_of(theirs).done
        other.expect(again, [1, 4])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_store_is_done_when_every_share_of_it_is(num_ranks: int) -> None:
    with group_of(num_ranks, counting) as ranks:
        slots = [3, 8, 1]
        ranks[0].host.fill_(poison.POISON)
        ranks[-1].stream(Direction.STORE).pause()
        tickets = []
        for rank in ranks:
            blocks = rank.take(len(slots))
            rank.fill_blocks(blocks, slots)
            tickets.append(rank.store(blocks, slots))
        assert tickets[0].result(0.1) is None
        ranks[-1].stream(Direction.STORE).resume()
        assert all(outcome_of(ticket).done for ticket in tickets)
        ranks[0].expect_records(slots)
        rows = [rank.inner.rows for rank in ranks if isinstance(rank.inner, Counting)]
        assert sum(rows) == 2 * PER_PAGE * len(slots)


def test_different_plans_are_refused_on_every_rank_and_moved_by_nobody() -> None:
    with group_of(2) as ranks:
        blocks = [rank.take(1) for rank in ranks]
        tickets = [rank.load(blocks[at], [at]) for at, rank in enumerate(ranks)]
        assert not any(outcome_of(ticket).done for ticket in tickets)
        assert any(isinstance(ticket.fault, PeerMismatch) for ticket in tickets)
        assert all(poison.is_poison(_rows(rank, 0)) for rank in ranks)
        assert all(restored(ranks, [3]))


def test_a_cancelled_load_fails_on_every_rank_and_the_group_goes_on() -> None:
    barrier = Barrier(2)
    with group_of(2, _held(barrier)) as (mine, other):
        ticket = mine.load(mine.take(1), [1])
        theirs = other.load(other.take(1), [1])
        assert barrier.reached.wait(SECONDS)
        theirs.cancel()
        barrier.open.set()
        assert not outcome_of(theirs).done
        assert "rank 1 gave" in outcome_of(ticket).cause
        assert restored([mine, other], RESTORED) == ["", ""]


def test_a_copy_that_fails_on_one_rank_fails_on_all() -> None:
    def failing(folder: Path, rank: int, num: int) -> Rank:
        once = iter([True])
        inner = FailingDevice(
            CpuDevice(wait_seconds=SECONDS),
            lambda _, layer: rank == 1 and layer == 2 and next(once, False),
        )
        return Rank(folder, rank, num, inner=inner, connect=False)

    with group_of(3, failing) as ranks:
        tickets = [rank.load(rank.take(3), [1, 2, 3]) for rank in ranks]
        assert [outcome_of(ticket).done for ticket in tickets] == [False] * 3
        found = restored(ranks, RESTORED)
        assert found == [""] * 3


def test_a_number_that_one_rank_leaves_out_is_moved_alone_and_the_next_together() -> None:
    numbers = [iter([1, 2, 3]), iter([1, 3])]
    make = lambda f, rank, num: counting(f, rank, num, numbering=lambda _: next(numbers[rank]))  # noqa: E731
    with group_of(2, make) as (mine, other):
        assert restored([mine, other], [1, 2]) == ["", ""]
        blocks = mine.take(2)
        alone = mine.load(blocks, [3, 4])
        found = restored([mine, other], [5, 6])
        assert found == ["", ""]
        assert outcome_of(alone).done
        mine.expect(blocks, [3, 4])


def test_pools_that_differ_by_rank_are_loaded_whole_beside_those_that_are_shared() -> None:
    def per_rank(folder: Path, rank: int, num: int) -> Rank:
        return counting(folder, rank, num, sharded=True)

    with group_of(2, per_rank) as ranks:
        for rank in ranks:
            rank.fill_records(range(SLOTS))  # each its own shard
        assert restored(ranks, RESTORED) == ["", ""]
        rows = [rank.inner.rows for rank in ranks if isinstance(rank.inner, Counting)]
        assert sum(rows) == 3 * PER_PAGE * len(RESTORED)


def test_a_plan_too_large_for_the_board_is_moved_by_each_rank() -> None:
    limits = replace(LIMITS, indices_max=2 * PER_PAGE)
    with group_of(2, lambda f, rank, num: counting(f, rank, num, limits=limits)) as ranks:
        assert restored(ranks, RESTORED) == ["", ""]
        rows = [rank.inner.rows for rank in ranks if isinstance(rank.inner, Counting)]
        assert rows == [2 * PER_PAGE * len(RESTORED)] * 2
        assert restored(ranks, [6]) == ["", ""]
        rows = [rank.inner.rows for rank in ranks if isinstance(rank.inner, Counting)]
        assert sum(rows) == 2 * PER_PAGE * (2 * len(RESTORED) + 1)


class Unreachable(CpuPeers):
    """A peer's memory that can't be opened."""

    def open(self, rank: int, exported: Any) -> None:
        raise PeerUnreachable(asked="reach a peer", found="no peer access", remedy="none")


def test_if_one_rank_does_not_reach_another_all_load_by_themselves() -> None:
    def make(folder: Path, rank: int, num: int) -> Rank:
        backend = Unreachable(folder / "memory") if rank == 1 else None
        return Rank(folder, rank, num, backend=backend, connect=False)

    with group_of(3, make, connected=False) as ranks:
        assert all(restored(ranks, RESTORED))


def test_ranks_with_other_pools_or_limits_are_refused() -> None:
    with shared_folder() as folder:
        limits = [LIMITS, replace(LIMITS, indices_max=7)]
        ranks = [Rank(folder, at, 2, limits=limits[at], connect=False) for at in range(2)]
        found = together([rank.connect for rank in ranks])
        assert [type(each) for each in found] == [PeerMismatch] * 2
        for rank in ranks:
            rank.close()


def test_ranks_that_do_not_come_are_waited_for_by_the_limit() -> None:
    limits = replace(LIMITS, connect_seconds=0.05)
    with group_of(1) as (only,):
        late = Rank(Path(f"{only.device.group.seat.folder}-2"), 0, 2, limits=limits, connect=False)
        assert late.connect() is False
        assert late.device.group.apart == "ranks [1] didn't come"
        late.close()


def test_a_folder_is_empty_once_the_ranks_are_connected() -> None:
    with group_of(2) as (mine, _):
        assert not mine.device.group.seat.folder.exists()


def _limited(limits: PeerLimits) -> Any:
    return lambda folder, rank, num: Rank(folder, rank, num, limits=limits, connect=False)


def _held(barrier: Barrier, **other: Any) -> Any:
    """Rank 1 stops before it enqueues one layer."""

    def make(folder: Path, rank: int, num: int) -> Rank:
        inner = FailingDevice(
            CpuDevice(wait_seconds=SECONDS), barrier if rank == 1 else lambda *_: False
        )
        return Rank(folder, rank, num, inner=inner, connect=False, **other)

    return make


def _rows(rank: Rank, layer_id: int) -> torch.Tensor:
    """The raw bytes of a layer of KV, past every gate."""
    found: torch.Tensor = rank.space.device_rows("kv", layer_id, 0)
    return found


def _read(rank: Rank, layer_id: int, blocks: list[int]) -> torch.Tensor:
    with rank.pools.reading(blocks):
        rows = rank.pools.pool("kv").layer(layer_id)
        return rows.reshape(rows.shape[0], -1).view(torch.uint8)[blocks].clone()


class Waiting(CpuPeers):
    """Greets only when it is told to."""

    go = threading.Event()

    def export(self, memories: Mapping[str, PoolMemory]) -> Any:
        assert self.go.wait(SECONDS)
        return super().export(memories)


def test_a_rank_whose_peer_has_refused_and_gone_is_refused_as_well() -> None:
    """The peer has removed the folder by then."""
    with shared_folder() as folder, ThreadPoolExecutor(1) as threads:
        other = replace(LIMITS, indices_max=7)
        ranks = [
            Rank(folder, 0, 2, limits=LIMITS, connect=False),
            Rank(folder, 1, 2, limits=other, connect=False, backend=Waiting(folder / "memory")),
        ]
        late = threads.submit(ranks[1].connect)
        with pytest.raises(PeerMismatch):
            ranks[0].connect()
        Waiting.go.set()
        with pytest.raises(PeerMismatch):
            late.result(SECONDS)
        for rank in ranks:
            rank.close()
