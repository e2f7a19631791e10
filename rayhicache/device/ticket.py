"""A ticket: one load or store under way, and the owner of its device pages until it closes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from rayhicache.core.plan import Indices
from rayhicache.device.counter import LayerTransferCounter
from rayhicache.device.protocols import Direction

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class TicketState(Enum):
    """OPEN; SEALED: given up, but copies may still land; DONE and FAILED are closed."""

    OPEN = "open"
    SEALED = "sealed"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a ticket ended. `cause` is empty when it is done; `late` if it was sealed before."""

    done: bool
    cause: str
    late: bool


class Ticket:
    """One load or store. Any thread may call.

    Device pages given to a ticket belong to it until it closes, cancelled or not: they are
    neither reused nor overwritten before the copy stream has passed its last copy.

    Attributes:
        id: unique in its copier.
        direction: LOAD or STORE.
        requests: ids of the requests that it serves.
        blocks: per pool, the device blocks that it owns.
        all_blocks: those of all pools.
        counter: gates the readers of a load.
        fault: what was raised while it was enqueued, if anything was.
        sums: of a store's pages, as `PageSums.sums`; there once it is done. Empty until its copies
            are enqueued, and when there was nothing to store.
    """

    def __init__(
        self,
        *,
        id: int,
        direction: Direction,
        requests: tuple[str, ...],
        blocks: Mapping[str, Indices],
        counter: LayerTransferCounter,
    ) -> None:
        self.id = id
        self.direction = direction
        self.requests = requests
        self.blocks, self.all_blocks = _sets(blocks)
        self.counter = counter
        self.fault: BaseException | None = None
        self.sums: Mapping[str, torch.Tensor] = {}
        self._state = TicketState.OPEN
        self._cause = ""
        self._late = False
        self._cancelled = False
        self._changed = threading.Condition()
        self._on_seal: list[Callable[[], None]] = []
        self._on_close: list[Callable[[Outcome], None]] = []

    @property
    def state(self) -> TicketState:
        """Where the ticket is."""
        return self._state

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave it up; the copier enqueues no further layer."""
        return self._cancelled

    def wait_all(self) -> None:
        """Make the caller's current stream wait for every layer of every pool.

        For readers that can't be gated one by one: graph replay, draft models, export to a peer.

        Raises:
            LoadFailed, GateTimeout: as `LayerTransferCounter.wait_until`.
        """
        self.counter.wait_all()

    def cancel(self) -> None:
        """Give the ticket up. Doesn't block; its pages stay its own until it closes."""
        self._cancelled = True

    def result(self, timeout: float | None = None) -> Outcome | None:
        """Block until the ticket has closed; None on time-out."""
        with self._changed:
            if not self._changed.wait_for(self._closed, timeout):
                return None
            return Outcome(done=self._state is TicketState.DONE, cause=self._cause, late=self._late)

    def on_seal(self, callback: Callable[[], None]) -> None:
        """Called once if the ticket is given up while copies may still land. Before it starts."""
        self._on_seal.append(callback)

    def on_close(self, callback: Callable[[Outcome], None]) -> None:
        """Called once, on the copier's thread, when no copy can land any more. Before it starts.

        The ticket is closed for `result` only after its callbacks have returned. One that raises
        is logged and kept in `fault`.
        """
        self._on_close.append(callback)

    def seal(self, cause: str) -> None:
        """The copier gives the ticket up while copies may still land."""
        with self._changed:
            if self._state is TicketState.SEALED:
                return  # the first cause stands, and callbacks are called once
            self._state = TicketState.SEALED
            self._cause = cause
            self._late = True
        for callback in self._on_seal:
            self._tell(callback)

    def close(self, cause: str = "") -> None:
        """The copier has seen the last copy pass; failed if there was a cause."""
        assert not self._closed()
        self._cause = self._cause or cause
        outcome = Outcome(done=not self._cause, cause=self._cause, late=self._late)
        for callback in self._on_close:
            self._tell(partial(callback, outcome))
        with self._changed:
            self._state = TicketState.DONE if outcome.done else TicketState.FAILED
            self._changed.notify_all()

    def _tell(self, callback: Callable[[], None]) -> None:
        """A callback that fails is told in the log and in `fault`: the lane and its other tickets
        go on.
        """
        try:
            callback()
        except BaseException as fault:
            self.fault = fault
            log.error("a callback of ticket %d failed", self.id, exc_info=fault)

    def _closed(self) -> bool:
        return self._state in (TicketState.DONE, TicketState.FAILED)


def _sets(blocks: Mapping[str, Indices]) -> tuple[dict[str, frozenset[int]], frozenset[int]]:
    """Per pool its blocks, and those of all; pools that share a block table share the set."""
    sets = {id(indices): frozenset(indices) for indices in blocks.values()}
    first, *others = sets.values() or [frozenset[int]()]
    return {pool: sets[id(indices)] for pool, indices in blocks.items()}, first.union(*others)
