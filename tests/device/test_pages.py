"""Each block is free or used, once; a ticket's blocks come back when it has closed (R12)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from device.worlds import NUM_BLOCKS, SECONDS, World, mla
from rayhicache.device.cpu import CpuDevice
from rayhicache.device.pages import PageAllocator
from rayhicache.errors import DoubleFree


def allocator(num_blocks: int = 8) -> PageAllocator:
    return PageAllocator(CpuDevice(), num_blocks)


def test_allocation_is_all_or_nothing() -> None:
    pages = allocator()
    assert pages.allocate(9) is None
    assert pages.num_free() == 8
    assert sorted(pages.allocate(8) or []) == list(range(8))
    assert pages.allocate(1) is None
    assert pages.allocate(0) == []


@pytest.mark.parametrize("wrong", [[7], [0, 7], [99], [-1]])
def test_a_double_free_names_the_block_and_frees_nothing(wrong: list[int]) -> None:
    pages = allocator()
    pages.allocate(3)
    with pytest.raises(DoubleFree, match=str(wrong[-1])) as raised:
        pages.free(wrong)
    assert raised.value.details["blocks"] == (wrong[-1],)
    assert pages.num_free() == 5
    with pytest.raises(DoubleFree, match="named twice"):
        pages.free([1, 1])
    pages.check()


def test_a_held_block_is_freed_once_and_given_out_when_the_last_ticket_closes() -> None:
    pages = allocator(1)
    pages.allocate(1)
    pages.hold(frozenset({0}))
    pages.hold(frozenset({0}))
    pages.free([0])
    with pytest.raises(DoubleFree):
        pages.free([0])
    pages.unhold(frozenset({0}))
    assert pages.allocate(1) is None
    pages.unhold(frozenset({0}))
    assert pages.allocate(1) == [0]
    pages.check()


def test_one_fence_for_all_blocks_freed_together_and_none_once_it_has_passed() -> None:
    device = CpuDevice()
    pages = PageAllocator(device, 8)
    pages.allocate(8)
    compute = device.new_stream("compute")
    compute.pause()
    with device.use(compute):
        pages.free([0, 1, 2])
        pages.free([3])
    assert len(pages.fences(frozenset({0, 1, 2}))) == 1
    assert len(pages.fences(frozenset({0, 3}))) == 2
    assert pages.fences(frozenset({5})) == []
    compute.resume()
    assert compute.synchronize(SECONDS)
    assert pages.fences(frozenset(range(8))) == []
    device.close()


@pytest.mark.parametrize("order", list(itertools.permutations(["cancel", "free", "finish"])))
@pytest.mark.parametrize("direction", ["load", "store"])
def test_cancel_and_completion_in_any_order_free_once(
    direction: str, order: tuple[str, ...]
) -> None:
    world = World(mla)
    blocks = world.take(NUM_BLOCKS)[:4]
    stream = world.loads if direction == "load" else world.stores
    stream.pause()
    ticket = (world.load if direction == "load" else world.store)(blocks, [0])
    finished = False
    for step in order:
        if step == "cancel":
            ticket.cancel()
        elif step == "free":
            world.pools.free(blocks)
        else:
            stream.resume()
            assert ticket.result(SECONDS)
            finished = True
        free = world.pools.allocator.num_free()
        assert free == (4 if finished and "free" in order[: order.index(step) + 1] else 0)
    assert sorted(world.take(4)) == sorted(blocks)
    with pytest.raises(DoubleFree):
        world.pools.free([*blocks, blocks[0]])
    world.close()


class PagesMachine(RuleBasedStateMachine):
    """Against sets: used, freed while held, and how often each block is held."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = allocator(6)
        self.used: set[int] = set()
        self.freed: set[int] = set()
        self.tickets: list[frozenset[int]] = []

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        blocks = self.pages.allocate(count)
        room = 6 - len(self.used) - len(self.freed)
        assert (blocks is None) == (count > room)
        assert not (self.used | self.freed) & set(blocks or ())
        self.used |= set(blocks or ())

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.used)), min_size=1, unique=True))
        self.pages.hold(frozenset(chosen))
        self.tickets.append(frozenset(chosen))

    @rule(blocks=st.lists(st.integers(0, 6), max_size=3))
    def free(self, blocks: list[int]) -> None:
        if len(set(blocks)) != len(blocks) or not set(blocks) <= self.used:
            with pytest.raises(DoubleFree):
                self.pages.free(blocks)
            return
        self.pages.free(blocks)
        self.used -= set(blocks)
        self.freed |= set(blocks) & self._held()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.tickets) - 1))
        self.pages.unhold(self.tickets.pop(at))
        self.freed &= self._held()

    def _held(self) -> set[int]:
        return {block for ticket in self.tickets for block in ticket}

    @invariant()
    def counts_agree(self) -> None:
        self.pages.check()
        assert self.pages.num_free() == 6 - len(self.used) - len(self.freed)
        assert self.pages.num_held() == len(self._held())


PagesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPages = PagesMachine.TestCase
