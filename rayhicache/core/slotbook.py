"""The book of slots: one state table with one writer, and the moves between its states.

    reserve: FREE → FILLING     close_part: FILLING → READY     seal: FILLING → SEALED
    pass_parts: SEALED → FREE   hide, then the last hold ends: READY → FREE

A move that isn't in this list can't be made from outside. The book knows neither sessions nor
leases: it counts holds. `Tier` decides who may ask for a move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rayhicache.core.eviction import EvictionPolicy
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import HitPolicy, RecordLayout
from rayhicache.core.slots import Region, SlotEntry, SlotRef, SlotState, SlotTable

NO_KEY = PageKey(b"")


@dataclass(slots=True)
class Slot:
    """State of one slot; written by `SlotBook` alone.

    Attributes:
        parts_open: bitmap of the parts that are neither committed nor passed.
        fillers: session of each part, 0 for one that nobody claimed after an adoption.
        holds: how many leases are on it.
        adopted: may be read by a process of the earlier life that hasn't re-attached yet.
        findable: READY and in the index.
        unverified: adopted, and its digests were not checked since.
    """

    group: int = 0
    state: SlotState = SlotState.FREE
    generation: int = 0
    key: PageKey = NO_KEY
    parent: PageKey = NO_KEY
    parts_open: int = 0
    fillers: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()
    holds: int = 0
    adopted: bool = False
    findable: bool = False
    unverified: bool = False

    @property
    def is_held(self) -> bool:
        """Whether somebody may be reading it."""
        return self.holds > 0 or self.adopted


@dataclass(slots=True)
class GroupBook:
    """The slots of one record group: which are free, and where READY and FILLING keys are."""

    region: Region
    whole: bool
    policy: EvictionPolicy
    free: list[int]
    index: dict[PageKey, int] = field(default_factory=dict)
    filling: dict[PageKey, int] = field(default_factory=dict)


class SlotBook:
    """Every slot of a tier. Not thread-safe; no call blocks.

    Args:
        settled: told of each filling that ended: group number, key, whether it is READY.
    """

    def __init__(
        self,
        layout: RecordLayout,
        regions: Sequence[Region],
        table: SlotTable,
        policy: Callable[[], EvictionPolicy],
        settled: Callable[[int, PageKey, bool], None],
    ) -> None:
        assert [region.group for region in regions] == [group.name for group in layout.groups]
        self.slots = [
            Slot(group=number)
            for number, region in enumerate(regions)
            for _ in range(region.num_slots)
        ]
        self.groups = [
            GroupBook(
                region=region,
                whole=group.policy is HitPolicy.ALL_PAGES,
                policy=policy(),
                free=list(range(region.first_slot, region.first_slot + region.num_slots))[::-1],
            )
            for region, group in zip(regions, layout.groups, strict=True)
        ]
        self.stored: list[tuple[str, PageKey]] = []
        self.removed: list[tuple[str, PageKey]] = []
        self.num_stored = 0
        self.num_evicted = 0
        self._table = table
        self._settled = settled

    def ref(self, slot: int) -> SlotRef:
        """The slot in its present life."""
        return SlotRef(slot, self.slots[slot].generation)

    def refs(self, numbers: Iterable[int]) -> list[SlotRef]:
        """The slots in their present lives."""
        slots = self.slots
        return [SlotRef(number, slots[number].generation) for number in numbers]

    def entry(self, number: int) -> SlotEntry:
        """What the slot table says of a slot.

        A READY record that must not be found any more has no key: should the owner die while it
        is leased, the next life holds it for its readers and shows it to nobody.
        """
        slot = self.slots[number]
        hidden = slot.state is SlotState.READY and not slot.findable
        return SlotEntry(
            slot.state,
            slot.generation,
            slot.group,
            NO_KEY if hidden else slot.key,
            slot.parent,
            slot.parts_open,
            slot.fillers[0] if slot.fillers else 0,
            slot.digests,
        )

    # ── filling ─────────────────────────────────────────────────────────────────────────────

    def make_room(self, group: int, count: int, keep: set[PageKey]) -> bool:
        """Evict until `count` slots are free, none of `keep`; False, and no change, if it can't."""
        book = self.groups[group]
        short = count - len(book.free)
        if short <= 0:
            return True
        victims = book.policy.victims(
            short, lambda key: key in keep or self.slots[book.index[key]].is_held
        )
        if len(victims) < short:
            return False
        for key in victims:
            self.remove(book.index[key])
        self.num_evicted += len(victims)
        return True

    def reserve(
        self, group: int, key: PageKey, parent: PageKey, fillers: tuple[int, ...]
    ) -> SlotRef:
        """Turn a FREE slot FILLING; there must be one, and the key must be nowhere."""
        book = self.groups[group]
        assert key not in book.index
        assert key not in book.filling
        number = book.free.pop()
        slot = self.slots[number]
        slot.state = SlotState.FILLING
        slot.generation += 1
        slot.key, slot.parent = key, parent
        slot.parts_open = (1 << len(fillers)) - 1
        slot.fillers = fillers
        book.filling[key] = number
        self._put(number)
        return SlotRef(number, slot.generation)

    def close_part(self, number: int, part: int, digests: tuple[int, ...]) -> bool:
        """A part of a FILLING record is there; whether the record turned READY by it."""
        slot = self.slots[number]
        assert slot.state is SlotState.FILLING
        assert slot.parts_open >> part & 1
        slot.parts_open &= ~(1 << part)
        if digests:
            slot.digests = _summed(slot.digests, digests)
        if slot.parts_open:
            self._put(number)
            return False
        book = self.groups[slot.group]
        del book.filling[slot.key]
        slot.state = SlotState.READY
        self._show(number)
        self.num_stored += 1
        self.stored.append((book.region.group, slot.key))
        self._settled(slot.group, slot.key, True)
        return True

    def pass_parts(self, number: int, mask: int) -> None:
        """Give a record up: SEALED if it isn't yet, FREE when no part is open any more.

        No copy of the parts of `mask` can land any more; those of the others still may. Should a
        process of an earlier life read it, it is kept as a hidden READY record for its sake.
        """
        slot = self.slots[number]
        if slot.state is SlotState.FILLING:
            slot.state = SlotState.SEALED
            del self.groups[slot.group].filling[slot.key]
            self._settled(slot.group, slot.key, False)
        assert slot.state is SlotState.SEALED
        slot.parts_open &= ~mask
        if not slot.parts_open and not slot.is_held:
            self._free(number)
            return
        if not slot.parts_open:
            slot.state, slot.fillers = SlotState.READY, ()
        self._put(number)

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def hold(self, refs: Iterable[SlotRef]) -> None:
        """One more lease is on READY slots, or on SEALED ones that were read before a crash."""
        for ref in refs:
            slot = self.slots[ref.slot]
            assert slot.state is SlotState.READY or slot.state is SlotState.SEALED
            slot.holds += 1

    def unhold(self, number: int) -> None:
        """One lease less; a hidden record is freed with its last one."""
        slot = self.slots[number]
        assert slot.holds > 0
        slot.holds -= 1
        if slot.state is SlotState.READY and not slot.findable and not slot.is_held:
            self._free(number)

    def remove(self, number: int) -> None:
        """Nobody finds this READY record any more; its slot is freed once nobody holds it."""
        slot = self.slots[number]
        book = self.groups[slot.group]
        assert slot.findable
        slot.findable = False
        del book.index[slot.key]
        book.policy.remove(slot.key)
        self.removed.append((book.region.group, slot.key))
        if slot.is_held:
            self._put(number)
        else:
            self._free(number)

    # ── another life ────────────────────────────────────────────────────────────────────────

    def adopt(self, entries: Iterable[tuple[int, SlotEntry]], num_parts: Sequence[int]) -> int:
        """Take over an earlier life's slots, held until `settle_adopted`; how many are findable.

        READY stays READY; FILLING and SEALED are SEALED, nobody's until they are claimed.

        Args:
            num_parts: of a record, per group.
        """
        ready = 0
        for number, entry in entries:
            slot = self.slots[number]
            assert slot.generation == 0, "adopt comes before everything else, once per slot"
            slot.generation = entry.generation
            if entry.state is SlotState.FREE:
                continue
            slot.key, slot.parent = PageKey(entry.key), PageKey(entry.parent)
            slot.digests = entry.digests
            slot.adopted = True
            if entry.state is not SlotState.READY:
                slot.state = SlotState.SEALED
                slot.fillers = (0,) * num_parts[slot.group]
                slot.parts_open = entry.parts_open or 1
                self._put(number)
                continue
            slot.state = SlotState.READY
            if not slot.key or slot.key in self.groups[slot.group].index:
                self._put(number)
                continue
            slot.unverified = True
            self._show(number)
            ready += 1
        for group in self.groups:
            group.free = [i for i in group.free if self.slots[i].state is SlotState.FREE]
        return ready

    def claim(self, ref: SlotRef, session: int, part: int) -> None:
        """A process of the earlier life still writes this part of a slot, if it is SEALED."""
        slot = self.slots[ref.slot]
        if slot.state is not SlotState.SEALED or slot.generation != ref.generation:
            return
        assert slot.fillers[part] in (0, session)
        slot.fillers = (*slot.fillers[:part], session, *slot.fillers[part + 1 :])
        slot.parts_open |= 1 << part
        self._put(ref.slot)

    def settle_adopted(self) -> None:
        """All processes of the earlier life have named what they use: free what nobody did."""
        for number, slot in enumerate(self.slots):
            if not slot.adopted:
                continue
            slot.adopted = False
            if slot.state is SlotState.SEALED:
                self.pass_parts(number, parts_of(slot.fillers, 0))
            elif not slot.findable and not slot.holds:
                self._free(number)

    # ── integrity ───────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Assert conservation: each slot is in one state, and every list agrees with it."""
        for group in self.groups:
            region = group.region
            ids = range(region.first_slot, region.first_slot + region.num_slots)
            by_state: Mapping[SlotState, set[int]] = {
                state: {i for i in ids if self.slots[i].state is state} for state in SlotState
            }
            assert by_state[SlotState.FREE] == set(group.free)
            assert len(group.free) == len(set(group.free))
            assert by_state[SlotState.FILLING] == set(group.filling.values())
            findable = {i for i in ids if self.slots[i].findable}
            assert findable == set(group.index.values()) <= by_state[SlotState.READY]
            for key, number in (*group.index.items(), *group.filling.items()):
                assert self.slots[number].key == key
        for slot in self.slots:
            _check_slot(slot)

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _show(self, number: int) -> None:
        slot = self.slots[number]
        book = self.groups[slot.group]
        slot.findable = True
        slot.parts_open, slot.fillers = 0, ()
        book.index[slot.key] = number
        book.policy.add(slot.key, slot.parent if slot.parent and book.whole else None)
        self._put(number)

    def _free(self, number: int) -> None:
        slot = self.slots[number]
        assert slot.state is not SlotState.FREE
        assert not slot.is_held
        slot.state = SlotState.FREE
        slot.key = slot.parent = NO_KEY
        slot.parts_open, slot.fillers, slot.digests = 0, (), ()
        slot.unverified = False
        self.groups[slot.group].free.append(number)
        self._put(number)

    def _put(self, number: int) -> None:
        self._table.put(number, self.entry(number))


def parts_of(fillers: tuple[int, ...], session: int) -> int:
    """Bitmap of the parts that a session fills."""
    return sum(1 << part for part, filler in enumerate(fillers) if filler == session)


def _summed(before: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    """Digests of a record from its parts': each part digests its own bytes, and sums add."""
    if not before:
        return more
    return tuple((a + b) & 0xFFFFFFFFFFFFFFFF for a, b in zip(before, more, strict=True))


def _check_slot(slot: Slot) -> None:
    filling = slot.state in (SlotState.FILLING, SlotState.SEALED)
    assert bool(slot.parts_open) == filling, "parts are open just while they are written"
    assert bool(slot.fillers) == filling
    if slot.state is SlotState.READY:
        assert slot.findable or slot.is_held, "a hidden record stays only while it is held"
    else:
        assert not slot.findable
        assert not slot.unverified
    if slot.state in (SlotState.FREE, SlotState.FILLING):
        assert not slot.is_held
    assert bool(slot.key) or slot.state is not SlotState.FILLING
