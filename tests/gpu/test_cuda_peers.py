"""Ranks on GPUs, in processes of their own, on one GPU or several: by CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from device.peer_ranks import SLOTS, Process, ServedRank, keys_of, shared_folder
from rayhicache.device.protocols import Direction
from rayhicache.testing import poison

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SLEEP_CYCLES = 20_000_000  # about 10 ms
LONG_CYCLES = 4_000_000_000  # about 2 s
Start = Callable[[int], list[Process]]


class CudaRank(ServedRank):
    """A rank whose pools are on a GPU; ranks share GPUs where there are too few."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, **other: Any) -> None:
        from rayhicache.device.cuda.device import CudaDevice
        from rayhicache.device.cuda.peers import CudaPeers

        device = CudaDevice(rank % torch.cuda.device_count())
        torch.cuda.set_device(device.torch_device)
        super().__init__(folder, rank, num_ranks, inner=device, backend=CudaPeers(device), **other)
        device.map_host(self.host, self.layout.shape().nbytes)
        assert device.wait_mapped(self.host)
        torch.cuda.synchronize()

    def sleep_before_passing_on(self, cycles: int) -> None:
        with torch.cuda.stream(_stream(self.device._lanes[Direction.LOAD]._side)):
            torch.cuda._sleep(cycles)

    def start_into_used(self, slots: Sequence[int], cycles: int) -> None:
        """Start a load into blocks that a forward, still asleep, has yet to poison."""
        blocks = self.take(len(slots))
        torch.cuda._sleep(cycles)
        poison.poison(self.memories)
        self.pools.free(blocks)
        self.blocks = self.take(len(slots))
        self.ticket = self.load(self.blocks, slots)

    def read(self, slots: Sequence[int]) -> None:
        """Read every layer through the gate, all enqueued at once, and check."""
        found = {}
        with self.pools.reading(self.blocks):
            for spec in self.layout.pools:
                for layer_id in spec.layer_ids:
                    rows = self.pools.pool(spec.name).layer(layer_id)
                    flat = rows.reshape(rows.shape[0], -1).view(torch.uint8)
                    found[spec.name, layer_id] = flat[self.blocks]
        for (name, layer_id), rows in found.items():
            for row, key in zip(rows.cpu(), keys_of(slots), strict=True):
                assert torch.equal(row, poison.content(key, name, layer_id, 0, row.numel()))

    def still_open(self) -> bool:
        return self.ticket.result(0.1) is None

    def close(self) -> None:
        torch.cuda.synchronize()
        assert self.copier.close(60.0)
        self.device.close()


def _stream(stream: Any) -> torch.cuda.Stream:
    found: torch.cuda.Stream = stream.stream
    return found


@pytest.fixture
def start() -> Iterator[Start]:
    ranks: list[Process] = []

    def begin(count: int) -> list[Process]:
        ranks.extend(Process(folder, rank, count, CudaRank) for rank in range(count))
        ranks[0].call("fill_records", list(range(SLOTS)))
        for rank in ranks:
            rank.begin("connect")
        assert all(rank.answer() for rank in ranks)
        return ranks

    with shared_folder() as folder:
        yield begin
        for rank in ranks:
            rank.end()


def each(ranks: Sequence[Process], name: str, *args: Any) -> list[Any]:
    for rank in ranks:
        rank.begin(name, *args)
    return [rank.answer() for rank in ranks]


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_gets_every_byte(start: Start, count: int) -> None:
    ranks = start(count)
    for slots in ([7, 2, 9, 0, 5], [3], list(range(SLOTS))):
        assert each(ranks, "restore", slots) == [""] * count


def test_a_layer_that_a_peer_passes_on_late_is_waited_for(start: Start) -> None:
    """R1: reads are enqueued before anything has landed."""
    first, second = start(2)
    second.call("sleep_before_passing_on", 10 * SLEEP_CYCLES)
    each([first, second], "start", [1, 4, 6])
    each([first, second], "read", [1, 4, 6])
    assert first.call("ended") == (True, "")


def test_a_peer_that_enqueues_late_is_waited_for(start: Start) -> None:
    """R3: nothing is read before the peer has enqueued its part."""
    first, second = start(2)
    first.call("start", [1, 4, 6])
    first.begin("read", [1, 4, 6])
    second.call("start", [1, 4, 6])
    first.answer()
    assert each([first, second], "ended") == [(True, "")] * 2


def test_blocks_are_written_behind_the_fences_of_their_owner(start: Start) -> None:
    """R10, across processes: the loaded content wins."""
    first, second = start(2)
    second.call("start_into_used", [1, 4], 10 * SLEEP_CYCLES)
    first.call("start", [1, 4])
    assert each([first, second], "ended") == [(True, "")] * 2
    each([first, second], "check", [1, 4])


def test_a_store_is_whole_when_it_is_done_on_any_rank(start: Start) -> None:
    ranks = start(2)
    each(ranks, "store_and_check", [3, 8, 1])


def test_a_rank_that_is_killed_releases_the_others(start: Start) -> None:
    first, second = start(2)
    second.call("sleep_before_passing_on", LONG_CYCLES)
    each([first, second], "start", [1, 4, 6])
    assert first.call("still_open")
    second.kill()
    done, cause = first.call("ended")
    assert not done
    assert "rank 1 has ended" in cause
    assert "rank 1 has ended" in first.call("restore", [3, 5])
