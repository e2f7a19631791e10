"""One direction of a group: how a rank's share is moved, passed on and waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from rayhicache.core.peers import (
    TRANSFERS_MAX,
    BoardShape,
    Sight,
    Way,
    outcome_of,
    plan_digest,
    pushed_of,
    share_of,
    sight_of,
    steps_of,
    way_of,
)
from rayhicache.device.peer_board import wait_until
from rayhicache.device.peer_group import PeerGroup
from rayhicache.device.peer_transfer import Transfer, raw, share_of_plan
from rayhicache.device.protocols import Device, Direction, Event, Landing, Stream
from rayhicache.device.staging import StagedPlan, StagedTransfer
from rayhicache.errors import PeerLost, PeerMismatch


class _WordEvent(Protocol):
    def __call__(self, group: PeerGroup, offset: int, value: int) -> Event: ...


class PeerLane:
    """Loads or stores of this rank. Called on the copier's planner thread of that direction."""

    def __init__(
        self,
        group: PeerGroup,
        device: Device,
        direction: Direction,
        numbering: Callable[[StagedPlan], int] | None,
        word_event: _WordEvent,
    ) -> None:
        self._group = group
        self._device = device
        self._loads = direction is Direction.LOAD
        self._lane = int(not self._loads)
        self._numbering = numbering or self._count
        self._word_event = word_event
        self._copies = 0
        self._records = 0
        # Runs behind each layer's landing, beside the copies of the next ones.
        self._side = device.new_stream(f"peers-{direction.value}")

    def begin(self, staged: StagedPlan, stream: Stream) -> Transfer | None:
        """Come to the next transfer; None if this rank moves it by itself.

        Waits for the other ranks, with a limit.

        Raises:
            PeerMismatch: another rank means another plan.
        """
        group = self._group
        number, own = self._numbering(staged), group.seat.rank
        shared = [t for t in staged.transfers if t.pool in group.shared and t.count]
        blocks = [t.pinned[t.count :] for t in shared]
        rows = sum(t.count for t in shared)
        # Each rank sees these alike, so nobody waits for a rank that goes on here.
        if not 0 < rows <= group.limits.indices_max or number > TRANSFERS_MAX:
            return None
        board, shape = group.board, group.board.shape
        digest = plan_digest(self._lane, ((t.pool, raw(t.pinned[: t.count])) for t in shared))
        indices = torch.cat(blocks).to(torch.int32)
        self._records += 1
        board.publish(self._lane, own, number, digest, indices, at=self._records % 2)
        board.set_number(shape.begun(self._lane, own), number)
        theirs: dict[int, torch.Tensor] = {}
        way, sights = self._look(number, digest, theirs)
        share = share_of_plan(staged, group.seat, group.shared)
        transfer = Transfer(group=group, lane=self._lane, number=number, share=share)
        if way is Way.TOGETHER:
            if self._loads:
                self._aim(transfer, shared, theirs)
            return transfer
        self._end(transfer, stream)
        named = {peer: sight.value for peer, sight in sights.items() if sight is not Sight.HERE}
        if way is Way.MISMATCH:
            group.leave(f"transfer {number} means other pages to other ranks")
            raise PeerMismatch(
                asked=f"move transfer {number} together",
                found=f"the ranks mean different pages by it: {named}",
                remedy="start the same loads and stores in the same order on every rank",
            )
        if way is not Way.ALONE:
            group.leave(f"transfer {number} found other ranks {named}")
        return None

    def move(self, transfer: Transfer, stream: Stream) -> Iterator[Landing]:
        """Enqueue this rank's part and what it waits for of the others'.

        Raises:
            PeerLost: a peer ended, gave the transfer up or came too late.
        """
        try:
            self._grant(transfer, stream)
            if self._loads:
                yield from self._load(transfer, stream)
            else:
                yield from self._device.copy(transfer.share, stream)
            transfer.whole = True
        finally:
            # Whatever came: the others count on it. This rank's blocks are its own again only
            # when each of them has said the same.
            self._end(transfer, stream)
            for peer in self._group.seat.peers:
                transfer.last += self._last(transfer, peer)

    @property
    def _shape(self) -> BoardShape:
        return self._group.board.shape

    def _count(self, _: StagedPlan) -> int:
        self._copies += 1
        return self._copies

    def _look(
        self, number: int, digest: int, theirs: dict[int, torch.Tensor]
    ) -> tuple[Way, dict[int, Sight]]:
        """Watch the other ranks until it's clear how to go on, or the limit has passed."""
        group, board = self._group, self._group.board
        digests: dict[int, int] = {}
        sights: dict[int, Sight] = {}

        def clear() -> bool:
            for peer in group.seat.peers:
                gone = group.gone(peer)  # first: what it said before it left is then seen
                begun = board.number(self._shape.begun(self._lane, peer))
                if begun == number and peer not in digests:
                    record = board.published(self._lane, peer, number)
                    if record is not None:
                        digests[peer], theirs[peer] = record
                sights[peer] = sight_of(
                    number, begun, gone=gone, digest=digests.get(peer), own=digest
                )
            return way_of(list(sights.values())) is not Way.WAIT

        wait_until(clear, group.limits.begin_seconds)
        return way_of(list(sights.values())), sights

    def _aim(
        self, transfer: Transfer, shared: list[StagedTransfer], theirs: dict[int, torch.Tensor]
    ) -> None:
        """Where each row of this rank's share lies in each peer's memory."""
        seat, backend = self._group.seat, self._group.backend
        start = 0
        for each in shared:
            rows = share_of(each.count, seat.rank, seat.num_ranks)
            mine = each.pinned[each.count + rows.start : each.count + rows.stop].clone()
            transfer.pushers[each.pool] = []
            for peer in seat.peers:
                at = theirs[peer][start + rows.start : start + rows.stop].to(torch.int64)
                pusher = backend.pusher(peer, each.pool, mine, at)
                transfer.pushers[each.pool].append((peer, pusher))
            start += each.count

    def _grant(self, transfer: Transfer, stream: Stream) -> None:
        """Say that this rank goes on, and wait until all have, and peers' blocks are free.

        No stream waits for the peers' fences: streams that share a queue of the hardware hold
        each other up, and two ranks' forwards could then wait for each other for ever.
        """
        group, board, number = self._group, self._group.board, transfer.number
        own, shape, lane = group.seat.rank, self._shape, self._lane
        if self._loads:  # behind the fences of this rank's blocks, which lie on its stream
            group.backend.write_word(stream, shape.free(lane, own), number)
        board.set_number(shape.granted(lane, own), number)
        limits = group.limits
        self._await(
            transfer,
            "go on with it",
            lambda peer: board.number(shape.granted(lane, peer)) >= number,
            limits.push_seconds,
        )
        if self._loads:
            self._await(
                transfer,
                "let go of its blocks",
                lambda peer: board.reached(shape.free(lane, peer), number),
                limits.fence_seconds,
            )

    def _load(self, transfer: Transfer, stream: Stream) -> Iterator[Landing]:
        """Pass every layer on as it lands; tell of it once every peer has enqueued its part."""
        group, number = self._group, transfer.number
        own, shape = group.seat.rank, self._shape
        waiting: deque[tuple[int, Landing]] = deque()
        steps = 0
        for landing in self._device.copy(transfer.share, stream):
            first, steps = steps, self._pass_on(transfer, landing, steps)
            words = [
                self._word_event(group, shape.ready(self._lane, peer, own, step), number)
                for step in range(first, steps)
                for peer in group.seat.peers
            ]
            waiting.append((steps, replace(landing, events=(*landing.events, *words))))
            while waiting:
                value = pushed_of(number, waiting[0][0])
                late = not all(self._pushed(peer, value) for peer in group.seat.peers)
                if late and len(waiting) <= group.limits.ahead:
                    break
                yield self._told(transfer, *waiting.popleft())
        while waiting:
            yield self._told(transfer, *waiting.popleft())

    def _pass_on(self, transfer: Transfer, landing: Landing, step: int) -> int:
        """Pass a landed layer on to all peers, unless one has given up; the steps so far.

        Raises:
            PeerLost: one has.
        """
        group, board, number = self._group, self._group.board, transfer.number
        own, given_up = group.seat.rank, outcome_of(number, whole=False)
        lock = group.locks[own]
        if not lock.acquire(group.limits.push_seconds):
            raise self._lost(transfer, "another rank holds this rank's lock")
        try:
            for peer in group.seat.peers:
                if board.number(self._shape.outcome(self._lane, peer, number)) == given_up:
                    raise self._lost(transfer, f"rank {peer} gave it up")
            step = self._push(transfer, landing, step)
            board.set_number(self._shape.pushed(self._lane, own), pushed_of(number, step))
        finally:
            lock.release()
        return step

    def _last(self, transfer: Transfer, peer: int) -> list[int]:
        """The word behind the last of a peer's copies that this rank waits for, if any.

        Its `closed`, or, of a load that this rank has given up, the last layer that it enqueued:
        it enqueues no more, though it may never come to say so.
        """
        group, own = self._group, self._group.seat.rank
        closed = self._shape.closed(self._lane, peer, own)
        if transfer.whole or not self._loads:
            return [closed]
        if not group.locks[peer].acquire(group.limits.push_seconds):
            return [closed]
        pushed = group.board.number(self._shape.pushed(self._lane, peer))
        group.locks[peer].release()
        steps = steps_of(transfer.number, pushed)
        return [self._shape.ready(self._lane, peer, own, steps - 1)] if steps else []

    def _push(self, transfer: Transfer, landing: Landing, step: int) -> int:
        """Copy a landed layer to every peer and write its word; the number of steps so far."""
        group, own = self._group, self._group.seat.rank
        for pool in landing.pools:
            if pool not in group.shared or pool not in {t.pool for t in transfer.share.transfers}:
                continue
            for event in landing.events:
                self._side.wait(event)
            position = group.shared[pool].spec.layer_ids.index(landing.layer_id)
            pushers = transfer.pushers.get(pool, [])
            for peer, pusher in pushers:
                pusher.enqueue(self._side, position)
                word = self._shape.ready(self._lane, own, peer, step)
                group.backend.write_word(self._side, word, transfer.number)
            step += bool(pushers)
        return step

    def _pushed(self, peer: int, value: int) -> bool:
        return self._group.board.number(self._shape.pushed(self._lane, peer)) >= value

    def _told(self, transfer: Transfer, steps: int, landing: Landing) -> Landing:
        """The landing, once every peer has enqueued its part of it."""
        value = pushed_of(transfer.number, steps)
        self._await(
            transfer,
            f"enqueue layer {landing.layer_id}",
            lambda peer: self._pushed(peer, value),
            self._group.limits.push_seconds,
        )
        return landing

    def _await(
        self, transfer: Transfer, what: str, passed: Callable[[int], bool], seconds: float
    ) -> None:
        """Wait as the host until it holds of every peer."""
        group, board, number = self._group, self._group.board, transfer.number
        given_up = outcome_of(number, whole=False)
        lost: list[str] = []
        behind: list[int] = []

        def known() -> bool:
            behind[:] = [peer for peer in group.seat.peers if not passed(peer)]
            for peer in behind:
                if peer in group.dead:
                    lost.append(f"rank {peer} has ended")
                elif board.number(self._shape.outcome(self._lane, peer, number)) == given_up:
                    lost.append(f"rank {peer} gave it up")
            return not behind or bool(lost)

        if not wait_until(known, seconds):
            lost.append(f"ranks {behind} didn't {what} in {seconds} s")
            group.leave(f"transfer {number}: {lost[0]}")
        if lost:
            raise self._lost(transfer, lost[0])

    def _lost(self, transfer: Transfer, found: str) -> PeerLost:
        return PeerLost(
            asked=f"move transfer {transfer.number} together",
            found=found,
            remedy="recompute its requests; each rank loads by itself once a rank is lost",
        )

    def _end(self, transfer: Transfer, stream: Stream) -> None:
        """Say how it ended, and, behind the last copy, that nothing touches the peers any more."""
        group, number, own = self._group, transfer.number, self._group.seat.rank
        outcome = self._shape.outcome(self._lane, own, number)
        group.board.set_number(outcome, outcome_of(number, whole=transfer.whole))
        try:
            self._order(stream, self._side)
            for peer in group.seat.peers:
                word = self._shape.closed(self._lane, own, peer)
                group.backend.write_word(self._side, word, number)
            self._order(self._side, stream)
        except RuntimeError as fault:  # the device is lost, and nothing of it can land
            group.collapse(f"its copies failed: {fault}")
            raise

    def _order(self, first: Stream, then: Stream) -> None:
        event = self._device.new_event()
        first.record(event)
        then.wait(event)
