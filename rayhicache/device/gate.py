"""Bindings: what a forward reads decides which tickets its readers wait for.

The gate knows the open tickets and the blocks that they own. A forward binds the blocks of its
batch once; the binding finds the tickets by itself, so an engine can't forget one, and every
reader of every pool goes through the binding, so a reader can't either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar, Token
from types import TracebackType

from rayhicache.device.protocols import Direction
from rayhicache.device.ticket import Ticket, TicketState
from rayhicache.errors import CaptureRefused, PageBusy, UnboundRead

Blocks = Collection[int] | Mapping[str, Collection[int]]

_bound: ContextVar[Binding | None] = ContextVar("rayhicache_binding", default=None)


def _never() -> bool:
    return False


class Binding:
    """The tickets that one forward's reads wait for. A context manager; may be entered again.

    It is carried by a context variable, so interleaved micro-batches, each in its own binding,
    don't mix.

    Args:
        capturing: whether the calling thread is capturing a graph; asked before every wait.
    """

    def __init__(
        self,
        loads: Sequence[Ticket],
        before_writes: Sequence[Ticket],
        *,
        writes: bool,
        capturing: Callable[[], bool] = _never,
    ) -> None:
        self._loads = tuple(loads)
        self._before_writes = tuple(before_writes)
        self._writes = writes
        self._capturing = capturing
        self._tokens: list[Token[Binding | None]] = []

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """The open loads whose blocks this forward reads; empty for most forwards."""
        return self._loads

    def wait(self, layer_id: int, pool: str) -> None:
        """Make the current stream wait for one layer of one pool.

        Raises:
            LoadFailed, GateTimeout: as `LayerTransferCounter.wait_until`.
            CaptureRefused: as `check_capture`, while a graph is captured.
        """
        if self._loads:
            self._refuse_capture()
            for ticket in self._loads:
                ticket.counter.wait_until(layer_id, pool)

    def check_write(self, pool: str) -> None:
        """Refuse a write outside a binding that says what it writes; let copies pass first.

        Raises:
            UnboundRead: the binding was made without `writes`.
            CaptureRefused: as `check_capture`, while a graph is captured.
        """
        if not self._writes:
            raise UnboundRead(
                asked=f"write to pool {pool!r}",
                found="the forward is bound for reading only",
                remedy="name what it writes: `pools.reading(pages, writes=pages)`",
            )
        if self._before_writes:
            self._refuse_capture()
            for ticket in self._before_writes:
                ticket.counter.wait_passed()

    def check_capture(self) -> None:
        """Refuse a graph capture under this binding if it has tickets to wait for.

        Waiting on an event recorded outside a capture invalidates the capture; a replay asks
        for `ticket.wait_all()` instead.

        Raises:
            CaptureRefused: with the open tickets.
        """
        found = [(t.direction.value, t.id) for t in (*self._loads, *self._before_writes)]
        if found:
            raise CaptureRefused(
                asked="capture a graph",
                found=f"open tickets {found} have blocks that it reads or writes",
                remedy="capture with nothing open, and call `ticket.wait_all()` before a replay",
            )

    def _refuse_capture(self) -> None:
        if self._capturing():
            self.check_capture()

    def __enter__(self) -> Binding:
        self._tokens.append(_bound.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _bound.reset(self._tokens.pop())


class Gate:
    """The open tickets of one set of pools, and the blocks that failed loads left undefined.

    A failed load's blocks stay with the gate after the ticket has closed: whoever reads them
    gets `LoadFailed`, until they are written, freed or loaded anew. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Ticket] = {}
        self._lost: dict[int, tuple[Ticket, dict[str, set[int]]]] = {}
        self._known_lost: set[int] = set()

    def bind(
        self, reads: Blocks, writes: Blocks = (), *, capturing: Callable[[], bool] = _never
    ) -> Binding:
        """Bind a forward that reads and writes these blocks.

        With nothing open this is one comparison.

        Args:
            reads: block ids as host integers, of all pools alike or per pool.
            writes: those that it writes; what a failed load left in them is forgotten.
            capturing: as `Device.capturing`.

        Raises:
            PageBusy: it would write a block that a load is filling; one that was given up lets
                the write wait for its last copy.
        """
        if not self._open and not self._lost:
            return Binding((), (), writes=bool(writes))
        with self._lock:
            tickets = list(self._open.values())
            loads = [t for t in tickets if t.direction is Direction.LOAD]
            given_up = [t for t in loads if t.state is TicketState.SEALED]
            busy = [t for t in loads if t not in given_up and _overlap(t.blocks, writes)]
            if busy:
                raise PageBusy(
                    asked="write to device blocks",
                    found=f"tickets {[t.id for t in busy]} of requests "
                    f"{[t.requests for t in busy]} are filling some of them",
                    remedy="write to other blocks, or wait until the tickets close",
                )
            # A sealed load enqueues nothing more: once its copies have passed its blocks are the
            # writer's. They are undefined from now on, and not only when the ticket closes.
            for ticket in given_up:
                self._lose(ticket)
            self._forget(writes)
            lost = [ticket for ticket, left in self._lost.values() if _overlap(left, reads)]
        stores = [t for t in tickets if t.direction is Direction.STORE]
        return Binding(
            [*(t for t in loads if t not in given_up and _overlap(t.blocks, reads)), *lost],
            [t for t in (*stores, *given_up) if _overlap(t.blocks, writes)],
            writes=bool(writes),
            capturing=capturing,
        )

    def open(self, ticket: Ticket) -> None:
        """Give the ticket its blocks.

        Raises:
            PageBusy: a block is being filled by another load, or a load would fill a block that
                a store reads.
        """
        with self._lock:
            for other in self._open.values():
                loads = Direction.LOAD in (other.direction, ticket.direction)
                if loads and _overlap(other.blocks, ticket.blocks):
                    raise PageBusy(
                        asked=f"start a {ticket.direction.value} for {ticket.requests}",
                        found=f"ticket {other.id} of {other.requests} owns some of its blocks",
                        remedy="use other blocks, or wait until that ticket closes",
                    )
            if ticket.direction is Direction.LOAD:
                self._forget(ticket.blocks)
            self._open[ticket.id] = ticket

    def close(self, ticket: Ticket, *, failed: bool) -> None:
        """The ticket's blocks are its own no more; a failed load leaves them undefined."""
        with self._lock:
            # Lost before it is closed: `bind` looks at both without the lock.
            if failed and ticket.direction is Direction.LOAD:
                self._lose(ticket)
            del self._open[ticket.id]
            self._known_lost.discard(ticket.id)

    def forget(self, blocks: Blocks) -> None:
        """These blocks are freed: nobody reads what is in them."""
        if self._lost:
            with self._lock:
                self._forget(blocks)

    def open_tickets(self) -> tuple[Ticket, ...]:
        """The tickets that are open now."""
        with self._lock:
            return tuple(self._open.values())

    def _lose(self, ticket: Ticket) -> None:
        """What the load left in its blocks is undefined; said once, so a write isn't forgotten."""
        if ticket.id not in self._known_lost:
            self._known_lost.add(ticket.id)
            self._lost[ticket.id] = (ticket, {p: set(b) for p, b in ticket.blocks.items()})

    def _forget(self, blocks: Blocks) -> None:
        for number, (_, lost) in list(self._lost.items()):
            for pool, mine in lost.items():
                mine.difference_update(
                    blocks.get(pool, ()) if isinstance(blocks, Mapping) else blocks
                )
            if not any(lost.values()):
                del self._lost[number]


def current_binding(pool: str) -> Binding:
    """The binding of the calling context.

    Raises:
        UnboundRead: there is none.
    """
    binding = _bound.get()
    if binding is None:
        raise UnboundRead(
            asked=f"use pool {pool!r}",
            found="the calling context has no binding",
            remedy="run the forward under `with pools.reading(pages):`",
        )
    return binding


def _overlap(owned: Mapping[str, AbstractSet[int]], blocks: Blocks) -> bool:
    if isinstance(blocks, Mapping):
        return any(not mine.isdisjoint(blocks.get(pool, ())) for pool, mine in owned.items())
    return any(not mine.isdisjoint(blocks) for mine in owned.values())
