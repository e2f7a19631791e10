"""What ranks that move pages together agree on: shares, a board of words, and verdicts.

The ranks of one tensor-parallel group need the same bytes of replicated pools. Each moves its
share of the rows over its own link and passes them to its peers. They agree without a collective,
through words on a board of shared memory. Transfers are numbered from 1, the same on all ranks,
and a word that stands for a transfer holds its number: it only grows, so nothing is ever reset,
and a late reader of an earlier transfer sees it as passed.

    begun     I have come to this transfer, and my record of it can be read
    granted   I go on with it together with the others; a load may now write to my blocks
    free      (by my stream) work that still used my blocks has passed
    pushed    I have enqueued so many layers of it for my peers
    ready     (by my stream, for one peer) a layer of it is in the peer's memory
    outcome   I have enqueued all of it, or given it up
    closed    (by my stream, for one peer) nothing of it touches the peer any more

Until every rank has begun a rank may still go by itself. Once one has seen all begun, each of
them closes the transfer, whatever comes: that is what makes it safe to wait for a peer's word.
A rank that gives a load up doesn't depend on that: a peer passes a layer on under a lock of its
own, and only to ranks that haven't given up. So whoever has said that it gives up, and has held
that lock since, knows the last layer that may still come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import ClassVar

WORD_BYTES = 4
NUMBER_BYTES = 8
PAGE_BYTES = 4096
OUTCOMES = 256  # more than the tickets of one lane that may be open
RECORDS = 2
LANES = 2
RELEASED = (1 << 31) - 1  # of a dead rank: greater, as streams compare, than any transfer
TRANSFERS_MAX = RELEASED - 1
PUSHED_BITS = 16


def share_of(count: int, rank: int, num_ranks: int) -> range:
    """The rows that a rank moves: contiguous, and one more than another's at most."""
    return range(count * rank // num_ranks, count * (rank + 1) // num_ranks)


def plan_digest(lane: int, pools: Iterable[tuple[str, bytes]]) -> int:
    """64 bits of what must be the same on every rank: per pool, its name and its host rows."""
    digest = blake2b(lane.to_bytes(1, "little"), digest_size=NUMBER_BYTES)
    for name, rows in pools:
        for part in (name.encode(), rows):
            digest.update(len(part).to_bytes(NUMBER_BYTES, "little"))
            digest.update(part)
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardShape:
    """Where each word of a board lies, in bytes from its start.

    First a page that says what each rank expects of the others, at the same place for all; then
    the words that streams write and wait for, 32 bits each, on pages of their own; then what only
    hosts read, 64 bits each; then a record of each rank for two transfers.

    Attributes:
        num_ranks: of the group.
        steps: layers of all pools that one transfer moves.
        indices_max: rows of all pools, of one transfer.
    """

    num_ranks: int
    steps: int
    indices_max: int

    stream_start: ClassVar[int] = PAGE_BYTES

    @property
    def stream_bytes(self) -> int:
        """The part that streams reach, from `stream_start`: whole pages."""
        words = LANES * self.num_ranks * (self.num_ranks * (self.steps + 1) + 1)
        return -(-words * WORD_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def record_bytes(self) -> int:
        """One record: number, digest, count, check, then `int32[indices_max]`."""
        return 4 * NUMBER_BYTES + -(-self.indices_max * 4 // NUMBER_BYTES) * NUMBER_BYTES

    @property
    def nbytes(self) -> int:
        """The whole board."""
        records = LANES * self.num_ranks * RECORDS * self.record_bytes
        return self._records + -(-records // PAGE_BYTES) * PAGE_BYTES

    def fingerprint(self, rank: int) -> int:
        """Digest of what the rank expects of the others; 0 until it has come."""
        return rank * NUMBER_BYTES

    def ready(self, lane: int, writer: int, reader: int, step: int) -> int:
        """The word of a layer, from a writer to a reader."""
        return self._pair(lane, writer, reader) + (1 + step) * WORD_BYTES

    def closed(self, lane: int, writer: int, reader: int) -> int:
        """The word that nothing of the writer's touches the reader any more."""
        return self._pair(lane, writer, reader)

    def free(self, lane: int, owner: int) -> int:
        """The word that the owner's blocks may be written."""
        pairs = LANES * self.num_ranks * self.num_ranks * (1 + self.steps)
        return self.stream_start + (pairs + lane * self.num_ranks + owner) * WORD_BYTES

    def begun(self, lane: int, rank: int) -> int:
        """The number of the transfer that the rank has come to."""
        return self._host(lane, rank, 0)

    def granted(self, lane: int, rank: int) -> int:
        """The number of the transfer that the rank goes on with."""
        return self._host(lane, rank, 1)

    def pushed(self, lane: int, rank: int) -> int:
        """The number of a transfer and how many of its steps the rank has enqueued; `pushed_of`."""
        return self._host(lane, rank, 2)

    def outcome(self, lane: int, rank: int, number: int) -> int:
        """How the rank ended enqueueing a transfer; `outcome_of`."""
        return self._host(lane, rank, 3 + number % OUTCOMES)

    def verdict(self, rank: int) -> int:
        """Whether the rank reaches its peers (1), doesn't (2), or hasn't tried (0)."""
        return self._ranks + rank * NUMBER_BYTES

    def left(self, rank: int) -> int:
        """1 once the rank goes by itself for good."""
        return self._ranks + (self.num_ranks + rank) * NUMBER_BYTES

    def record(self, lane: int, rank: int, at: int) -> int:
        """The start of one of the rank's records."""
        return self._records + ((lane * self.num_ranks + rank) * RECORDS + at) * self.record_bytes

    def waited_for(self, writer: int, reader: int) -> list[int]:
        """Every word that the reader's streams may wait for and the writer's write."""
        found = []
        for lane in range(LANES):
            found += [self.closed(lane, writer, reader), self.free(lane, writer)]
            found += [self.ready(lane, writer, reader, step) for step in range(self.steps)]
        return found

    @property
    def _hosts(self) -> int:
        return self.stream_start + self.stream_bytes

    @property
    def _ranks(self) -> int:
        return self._hosts + LANES * self.num_ranks * (3 + OUTCOMES) * NUMBER_BYTES

    @property
    def _records(self) -> int:
        end = self._ranks + 2 * self.num_ranks * NUMBER_BYTES
        return -(-end // PAGE_BYTES) * PAGE_BYTES

    def _pair(self, lane: int, writer: int, reader: int) -> int:
        pair = (lane * self.num_ranks + writer) * self.num_ranks + reader
        return self.stream_start + pair * (1 + self.steps) * WORD_BYTES

    def _host(self, lane: int, rank: int, at: int) -> int:
        row = (lane * self.num_ranks + rank) * (3 + OUTCOMES)
        return self._hosts + (row + at) * NUMBER_BYTES


def pushed_of(number: int, steps: int) -> int:
    """The value that says that so many steps of a transfer are enqueued; it only grows."""
    return number << PUSHED_BITS | steps


def steps_of(number: int, pushed: int) -> int:
    """How many steps of a transfer a value of `pushed` stands for."""
    return pushed & (1 << PUSHED_BITS) - 1 if pushed >> PUSHED_BITS == number else 0


def outcome_of(number: int, *, whole: bool) -> int:
    """The value that says how a rank ended enqueueing a transfer."""
    return number << 1 | (not whole)


class Sight(Enum):
    """A peer, as a rank sees it that has come to a transfer."""

    HERE = "here"
    BEHIND = "behind"
    AHEAD = "ahead"
    DIFFERENT = "different"
    GONE = "gone"


def sight_of(number: int, begun: int, *, gone: bool, digest: int | None, own: int) -> Sight:
    """What a peer's words mean for a transfer.

    Args:
        begun: the transfer that the peer has come to.
        gone: it's dead, or goes by itself for good.
        digest: of its record of this transfer; None while that can't be read.
        own: digest of this rank's plan.
    """
    if begun == number and digest not in (None, own):
        return Sight.DIFFERENT  # also of one that has left: for this very reason
    if gone:
        return Sight.GONE
    if begun > number:
        return Sight.AHEAD
    return Sight.BEHIND if begun < number or digest is None else Sight.HERE


class Way(Enum):
    """How a rank goes on: TOGETHER, ALONE with this transfer, APART from now on, or MISMATCH."""

    WAIT = "wait"
    TOGETHER = "together"
    ALONE = "alone"
    APART = "apart"
    MISMATCH = "mismatch"


def way_of(sights: Sequence[Sight]) -> Way:
    """How to go on, by what is seen of every peer; the gravest counts."""
    for sight, way in (
        (Sight.DIFFERENT, Way.MISMATCH),
        (Sight.GONE, Way.APART),
        (Sight.AHEAD, Way.ALONE),
        (Sight.BEHIND, Way.WAIT),
    ):
        if sight in sights:
            return way
    return Way.TOGETHER


def why_not_whole(number: int, rank: int, *, closed: int, outcome: int) -> str:
    """Why a peer's part of a transfer isn't there once its `closed` was waited for, or nothing.

    Args:
        closed: the peer's word. RELEASED was written in the dead peer's stead, so what was
            waited for may not have come.
        outcome: the peer's word of this transfer.
    """
    if closed == RELEASED:
        return f"rank {rank} has ended"
    if outcome != outcome_of(number, whole=True):
        return f"rank {rank} gave transfer {number} up"
    return ""
