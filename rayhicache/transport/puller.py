"""Pulling: records of another node's pool become records of this one.

    lease at the owner ─► reserve own slots ─► for each layer group, in the order of the forward:
        chunks of all pages, a few in flight ─► verify ─► write ─► signal the group
    ─► commit ─► acknowledge

Nothing that failed its check is ever written, and nothing is found before the commit.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rayhicache.core.keys import PageKey
from rayhicache.core.layout import LayerRun
from rayhicache.core.outcomes import Fill
from rayhicache.errors import DigestMismatch, TransportError
from rayhicache.memory.digest import placed, run_sums
from rayhicache.memory.owner import ArenaOwner
from rayhicache.transport.protocol import ChunkRequest, PeerLease, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """Limits of one pull.

    Attributes:
        chunk_bytes: about the size of one chunk; at least one record's run.
        chunks_in_flight: chunks asked for and not yet there.
        call_seconds: limit of each call.
        pull_seconds: limit of the whole pull.
    """

    chunk_bytes: int = 4 << 20
    chunks_in_flight: int = 3
    call_seconds: float = 5.0
    pull_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A part of a layer group: which of the fills, and where their records lie at the owner."""

    group: int
    run: LayerRun
    fills: tuple[int, ...]


class Puller:
    """Pulls prefixes into this node's arena. Any thread may call.

    Args:
        session: the pool's own session, which fills the slots.
        on_group: told (layer group, keys) once that group of all these pages is there and
            verified, in the order of the forward; called on the pulling thread.
    """

    def __init__(
        self,
        owner: ArenaOwner,
        transport: Transport,
        session: Callable[[], int],
        *,
        limits: PullLimits | None = None,
        on_group: Callable[[int, Sequence[PageKey]], None] = lambda group, keys: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owner = owner
        self._transport = transport
        self._session = session
        self._limits = limits or PullLimits()
        self._on_group = on_group
        self._clock = clock
        self._calls = ThreadPoolExecutor(
            max_workers=4 * self._limits.chunks_in_flight, thread_name_prefix="pull"
        )

    def pull(self, seat: str, keys: Sequence[PageKey], have: int) -> int:
        """Pull the pages after the first `have` of a prefix; how many are new here.

        Pages that another call is pulling are waited for and not pulled twice. Blocks until the
        pages are committed, at most `pull_seconds`.

        Returns:
            0 if the peer has nothing more, or this arena has no room.

        Raises:
            TransportError: the peer failed; every slot that was reserved is free again.
            DigestMismatch: it sent wrong bytes; likewise.
        """
        layout = self._owner.layout
        assert layout is not None, "a pool pulls only for a worker that has attached"
        deadline = self._clock() + self._limits.pull_seconds
        lease = self._transport.lease(
            seat, keys, layout.fingerprint(), timeout=self._limits.call_seconds
        )
        if lease is None:
            return 0
        suspects: list[PageKey] = []
        try:
            _check_lease(lease, len(keys))
            return self._fill(lease, keys[: len(lease.refs)], have, deadline, suspects)
        finally:
            # After `close` the lease ends by its deadline.
            with contextlib.suppress(RuntimeError):
                self._calls.submit(self._acknowledge, lease, suspects)

    def close(self) -> None:
        """Take no more pulls; calls under way end by their own limits."""
        self._calls.shutdown(wait=False, cancel_futures=True)

    def _fill(
        self,
        lease: PeerLease,
        keys: Sequence[PageKey],
        have: int,
        deadline: float,
        suspects: list[PageKey],
    ) -> int:
        session = self._session()
        wanted = keys[have:]
        reserved = (
            self._owner.reserve(wanted, session, parent=keys[have - 1] if have else None)
            if wanted
            else None
        )
        if reserved is None:
            return 0
        refs = [fill.ref for fill in reserved.fills]
        pages = {key: at for at, key in enumerate(keys)}
        try:
            digests = self._transfer(lease, reserved.fills, pages, deadline, suspects)
        except BaseException:
            # Only this thread writes into the slots, so nothing can land in them any more.
            self._owner.abort(refs, session)
            raise
        self._owner.commit(refs, session, digests=digests)
        if reserved.filling:
            self._owner.wait_for(reserved.filling, session, max(deadline - self._clock(), 0))
        return len(refs)

    def _transfer(
        self,
        lease: PeerLease,
        fills: Sequence[Fill],
        pages: dict[PageKey, int],
        deadline: float,
        suspects: list[PageKey],
    ) -> list[tuple[int, ...]]:
        """Bring every layer group of the fills; their digests in this arena."""
        layout = self._owner.layout
        assert layout is not None
        runs = layout.shape(layout.groups[0].name).group_runs
        digests: list[list[int]] = [[] for _ in fills]
        left = [len(fills)] * len(runs)
        for chunk, payload in self._chunks(lease, runs, fills, pages, deadline):
            rows = self._verified(lease, chunk, payload, fills, pages, suspects)
            for at, fill_number in enumerate(chunk.fills):
                fill = fills[fill_number]
                data = memoryview(payload)[at * chunk.run.nbytes : (at + 1) * chunk.run.nbytes]
                self._owner.view(fill.ref, chunk.run.offset, chunk.run.nbytes)[:] = data
                place = (layout.fingerprint(), chunk.group)
                digests[fill_number].append(placed(rows[at], fill.key, fill.ref.generation, place))
            left[chunk.group] -= len(chunk.fills)
            if not left[chunk.group]:
                self._on_group(chunk.group, [fill.key for fill in fills])
        return [tuple(parts) for parts in digests]

    def _verified(
        self,
        lease: PeerLease,
        chunk: _Chunk,
        payload: bytes,
        fills: Sequence[Fill],
        pages: dict[PageKey, int],
        suspects: list[PageKey],
    ) -> list[int]:
        """The sums of a chunk's rows, once they are what the owner's digests say."""
        layout = self._owner.layout
        assert layout is not None
        if len(payload) != chunk.run.nbytes * len(chunk.fills):
            raise TransportError(
                asked=f"pull layer group {chunk.group} of {len(chunk.fills)} pages",
                found=f"{len(payload):,} B came instead of {chunk.run.nbytes:,} B a page",
                remedy="compute the pages, and see what the peer's log says",
            )
        rows = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = rows.view(len(chunk.fills), chunk.run.nbytes)
        record_group = layout.groups[0].name
        sums: list[int] = run_sums(layout, record_group, chunk.group, rows).tolist()
        for at, fill_number in enumerate(chunk.fills):
            key = fills[fill_number].key
            page = pages[key]
            told = lease.digests[page]
            place = (layout.fingerprint(), chunk.group)
            mine = placed(sums[at], key, lease.refs[page].generation, place)
            if chunk.group >= len(told) or told[chunk.group] != mine:
                suspects.append(key)
        if suspects:
            raise DigestMismatch(
                asked=f"pull layer group {chunk.group} of {len(chunk.fills)} pages from seat "
                f"{lease.seat!r}",
                found=f"the bytes of {len(suspects)} pages are not those that were stored",
                remedy="compute the pages; the owner forgets its records",
            )
        return sums

    def _chunks(
        self,
        lease: PeerLease,
        runs: Sequence[LayerRun],
        fills: Sequence[Fill],
        pages: dict[PageKey, int],
        deadline: float,
    ) -> Iterator[tuple[_Chunk, bytes]]:
        """The chunks in the order of the forward, a few ahead of the consumer."""
        waiting: deque[tuple[_Chunk, Future[bytes]]] = deque()
        try:
            for chunk in self._divided(runs, len(fills)):
                request = ChunkRequest(
                    lease=lease.lease,
                    epoch=lease.epoch,
                    refs=tuple(lease.refs[pages[fills[at].key]] for at in chunk.fills),
                    layer_group=chunk.group,
                )
                waiting.append((chunk, self._read(lease.seat, request)))
                if len(waiting) >= self._limits.chunks_in_flight:
                    yield self._next(waiting, deadline)
            while waiting:
                yield self._next(waiting, deadline)
        finally:
            # However the pull ends: what was not asked for yet isn't wanted any more.
            for _, call in waiting:
                call.cancel()

    def _read(self, seat: str, request: ChunkRequest) -> Future[bytes]:
        try:
            return self._calls.submit(
                self._transport.read, seat, request, timeout=self._limits.call_seconds
            )
        except RuntimeError as fault:
            raise TransportError(
                asked=f"pull layer group {request.layer_group} from seat {seat!r}",
                found="this pool is closed",
                remedy="compute the pages",
            ) from fault

    def _divided(self, runs: Sequence[LayerRun], count: int) -> Iterator[_Chunk]:
        for group, run in enumerate(runs):
            step = max(self._limits.chunk_bytes // max(run.nbytes, 1), 1)
            for start in range(0, count, step):
                numbers = tuple(range(start, min(start + step, count)))
                yield _Chunk(group=group, run=run, fills=numbers)

    def _next(
        self, waiting: deque[tuple[_Chunk, Future[bytes]]], deadline: float
    ) -> tuple[_Chunk, bytes]:
        chunk, call = waiting.popleft()
        try:
            return chunk, call.result(max(deadline - self._clock(), 0))
        except TimeoutError as fault:
            call.cancel()
            raise TransportError(
                asked=f"pull layer group {chunk.group} of {len(chunk.fills)} pages",
                found=f"the whole pull took more than {self._limits.pull_seconds} s",
                remedy="compute the pages",
            ) from fault

    def _acknowledge(self, lease: PeerLease, suspects: Sequence[PageKey]) -> None:
        try:
            self._transport.acknowledge(
                lease.seat, lease.lease, suspects, timeout=self._limits.call_seconds
            )
        except TransportError:
            return  # the lease ends by its deadline


def _check_lease(lease: PeerLease, num_keys: int) -> None:
    """Refuse a lease that can't be an answer to `num_keys` keys."""
    if not len(lease.digests) == len(lease.refs) <= num_keys:
        raise TransportError(
            asked=f"lease {num_keys} pages at seat {lease.seat!r}",
            found=f"{len(lease.refs)} records with {len(lease.digests)} digests came",
            remedy="compute the pages, and see what the peer's log says",
        )
