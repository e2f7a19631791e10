"""`TierClient`: the one object that an engine holds. It looks up, loads and stores.

    found  = client.lookup(prompt)                       one call to the owner; leases
    ticket = client.load([Load(...)])                    microseconds; copies run beside the forward
    with pools.reading(blocks, writes=new_blocks):       every read waits for its layer
        forward()
    client.store("r1", prompt, blocks, stop=n)           microseconds; reserved, copied, committed

A fault of the tier costs a recompute: an owner that can't be reached is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from rayhicache.core.hits import MISS, Hit
from rayhicache.core.keys import InputSpan, Namespace, PageKey, page_keys
from rayhicache.core.layout import RecordLayout
from rayhicache.core.outcomes import Fill
from rayhicache.core.plan import TransferPlan, plan_pages
from rayhicache.core.slots import SlotRef, slots_of
from rayhicache.device.copier import Copier, LoadRequest, StoreRequest
from rayhicache.device.limits import CopyLimits
from rayhicache.device.space import HostRegion, TransferSpace
from rayhicache.device.ticket import Outcome, Ticket
from rayhicache.errors import (
    InvalidLayout,
    InvalidRequest,
    PoolUnreachable,
    SessionEnded,
    StaleEpoch,
    StaleSlot,
    UnknownLease,
)
from rayhicache.memory.digest import placed_sums
from rayhicache.memory.port import OpenSlots, Port
from rayhicache.memory.sessions import LIFE_BITS
from rayhicache.memory.view import ArenaView
from rayhicache.pools.base import PoolSet
from rayhicache.requests import Found, Load, ModelIdentity, Prompt

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# What a call to the owner may meet without any wrong on our side: it died, was restarted, or
# took the session for dead. All of them cost a recompute.
OWNER_FAULTS = (PoolUnreachable, StaleEpoch, SessionEnded, StaleSlot, UnknownLease)


@dataclass(slots=True)
class _Filling:
    """What a store has reserved; written by the copier's threads, one after the other."""

    fills: tuple[Fill, ...] = ()
    sealed: bool = False


@dataclass(slots=True)
class _Open:
    """Slots of open leases and fills, by lease or ticket, for an owner that was restarted."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    reading: dict[int, tuple[SlotRef, ...]] = field(default_factory=dict)
    writing: dict[int, tuple[SlotRef, ...]] = field(default_factory=dict)

    def slots(self) -> OpenSlots:
        with self.lock:
            return OpenSlots(
                reading=tuple(ref for refs in self.reading.values() for ref in refs),
                writing=tuple(ref for refs in self.writing.values() for ref in refs),
            )


class TierClient:
    """An engine's way to the tier. Any thread may call.

    Device blocks stay the engine's; while a ticket is open they belong to the ticket, and freed
    ones are reused only after it has closed. A ticket closes by itself when its last copy has
    passed and, for a store, its records are committed.

    Args:
        port: to the owner of this node's arena.
        pools: the engine's pools; their tensors decide the layout.
        identity: of the model.
        page_tokens: tokens a page.

    Raises:
        LayoutMismatch: the arena holds another layout.
        NoLocalPool: this node has no owner.
    """

    def __init__(
        self,
        port: Port,
        pools: PoolSet,
        identity: ModelIdentity,
        *,
        page_tokens: int = 64,
        limits: CopyLimits | None = None,
    ) -> None:
        self.layout: RecordLayout = pools.layout(page_tokens)
        if len(self.layout.groups) != 1:
            raise InvalidLayout(
                asked="connect an engine",
                found=f"its pools are of groups {[group.name for group in self.layout.groups]}",
                remedy="put all pools that share a block table into one record group",
            )
        self._group = self.layout.groups[0].name
        self.identity = identity
        self._port = port
        self._pools = pools
        self._open = _Open()
        self._closed = False
        self._attachment = port.attach(self.layout, self._open.slots)
        self._arena = ArenaView.open(self._attachment)
        (region,) = self._attachment.regions
        self._host = HostRegion(
            region=region,
            data=torch.frombuffer(self._arena.region(region.group), dtype=torch.uint8),
        )
        pools.device.map_host(self._host.data, region.record_bytes)
        self._copier = Copier(
            pools.device,
            TransferSpace(self.layout, pools.memories(), {self._group: self._host}),
            pools.gate,
            allocator=pools.allocator,
            limits=limits,
        )

    def prompt(
        self,
        tokens: Sequence[int],
        *,
        inputs: Sequence[InputSpan] = (),
        adapter: str = "",
        salt: str = "",
    ) -> Prompt:
        """Hash a prompt's whole pages. No call, no wait.

        Raises:
            InvalidRequest: a token id that is no uint32.
        """
        parent = self.seed(adapter=adapter, salt=salt)
        keys = page_keys(parent, tokens, self.layout.page_tokens, inputs)
        return Prompt(tokens=tokens, keys=tuple(keys))

    def seed(self, *, adapter: str = "", salt: str = "") -> PageKey:
        """The parent of every prompt's first page: what the bytes depend on besides tokens."""
        namespace = Namespace(
            model=self.identity.model,
            revision=self.identity.revision,
            config_digest=self.identity.config_digest,
            weights_version=self.identity.weights_version,
            adapter=adapter,
            salt=salt,
            dtype=self.identity.dtype,
            page_tokens=self.layout.page_tokens,
            layout_fingerprint=self.layout.fingerprint(),
            parallel_shape=self.identity.parallel_shape,
        )
        return namespace.seed()

    def lookup(self, prompt: Prompt) -> Found:
        """Find and lease the restorable prefixes. Blocks for one call to the owner.

        Never fails for the tier's sake: an owner that can't be reached is a miss.
        """
        page, block = self.layout.page_tokens, self._pools.block_tokens
        usable = max(len(prompt.tokens) - 1, 0)
        keys = prompt.keys[: -(-usable // page)] if block < page else prompt.keys[: usable // page]
        hit = self._held(
            self._ask("lookup", lambda: self._port.lookup(keys), MISS) if keys else MISS
        )
        lengths = [pages * page for pages in hit.lengths]
        if lengths:  # the last page may be cut, to nothing or to where the engine's blocks end
            last = min(lengths.pop(), usable // block * block)
            lengths += [last] if last > (lengths[-1] if lengths else 0) else []
        return Found(
            prompt=prompt,
            hit=hit,
            lengths=tuple(lengths),
            pulled_tokens=min(hit.pulled, hit.best) * page,
        )

    def release(self, found: Found) -> None:
        """Give up what a lookup found, if it isn't loaded. A miss has nothing to release."""
        if found.hit.lease is not None:
            self._release(found.hit.lease.id)

    def load(self, requests: Sequence[Load]) -> Ticket:
        """Start one load for a batch; its layers arrive in the order of the forward.

        Doesn't wait for copies. The blocks belong to the ticket until it closes, and the leases
        end with it. Readers that bind the blocks wait by themselves; on `LoadFailed` the engine
        computes the batch again into the same blocks, and the tier forgets the records.

        Raises:
            InvalidRequest: more blocks than were found, or a miss among the requests.
            InvalidPlan, PageBusy, QueueFull, TierClosed: nothing was started and the leases are
                still held.
        """
        plans = [LoadRequest(id=r.id, plan=self._load_plan(r)) for r in requests]
        leases = [r.found.hit.lease.id for r in requests if r.found.hit.lease is not None]

        def closed(outcome: Outcome) -> None:
            for lease in leases:
                self._release(lease)
            if not outcome.done and outcome.cause != "cancelled":
                keys = [key for r in requests for key in r.found.prompt.keys[: r.found.hit.best]]
                self._ask("doubt", lambda: self._port.doubt(keys), None)

        return self._copier.start_loading(plans, prepare=lambda ticket: ticket.on_close(closed))

    def store(
        self, id: str, prompt: Prompt, blocks: Sequence[int], *, stop: int, start: int = 0
    ) -> Ticket:
        """Start storing the whole pages of the tokens [start, stop). Doesn't wait.

        The copies wait for the caller's current stream, and the blocks are reusable only after
        them. A page that is there already, or being filled by another, is not copied again; when
        the arena has no room nothing is stored. The ticket closes after the commit.

        Args:
            id: of the request.
            blocks: device blocks of these tokens, in order.
            start: a page boundary.
            stop: the end of what is final: no token that may yet be rejected.

        Raises:
            InvalidRequest: `start` isn't a page boundary, or there are too few blocks or tokens.
            PageBusy, QueueFull, TierClosed: nothing was started.
        """
        page, block = self.layout.page_tokens, self._pools.block_tokens
        if start % page or stop > len(prompt.tokens) or len(blocks) * block < stop - start:
            raise InvalidRequest(
                asked=f"store tokens [{start}, {stop}) of request {id!r}",
                found=f"pages of {page}, a prompt of {len(prompt.tokens)} tokens, "
                f"{len(blocks)} blocks of {block}",
                remedy="start at a page boundary and pass the blocks of all these tokens",
            )
        first, last = start // page, max(stop // page, start // page)
        keys = prompt.keys[first:last]
        per_page = page // block
        mine = {key: blocks[at * per_page : (at + 1) * per_page] for at, key in enumerate(keys)}
        taken = tuple(b for owned in mine.values() for b in owned)
        filling = _Filling()
        parent = prompt.keys[first - 1] if first else None
        request = StoreRequest(
            id=id,
            blocks=dict.fromkeys(self._pools.pools, taken),
            plan=lambda: self._reserve(filling, keys, parent, mine),
        )

        def prepare(ticket: Ticket) -> None:
            ticket.on_seal(lambda: self._seal(filling))
            ticket.on_close(lambda outcome: self._settle(ticket, filling, outcome))

        return self._copier.start_writing([request], prepare=prepare)

    def close(self, timeout: float = 30.0) -> bool:
        """Drain the copies, end the session and unmap the arena. Idempotent.

        Returns:
            False if copies were still under way after `timeout` seconds: the arena then stays
            mapped, and the owner ends the session when the process does, or a later call.
        """
        if self._closed:
            return True
        if not self._copier.close(timeout):
            log.warning("copies are still under way after %s s; leaving the arena mapped", timeout)
            return False
        self._closed = True
        self._pools.device.unmap_host(self._host.data)
        self._ask("close", self._port.close, None)
        self._arena.close()
        return True

    # ── inside ──────────────────────────────────────────────────────────────────────────────

    def _ask(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return call()
        except OWNER_FAULTS as fault:
            log.warning("%s: %s", what, fault)
            return otherwise

    def _held(self, hit: Hit) -> Hit:
        """Note what a lookup leased, for an owner that is restarted; a miss if one just was.

        A successor keeps the slots that are noted when it asks. One that began after the answer
        may have asked before the note.
        """
        if hit.lease is None:
            return hit
        with self._open.lock:
            self._open.reading[hit.lease.id] = tuple(hit.lease.refs())
        if hit.lease.id >> LIFE_BITS == self._arena.epoch():
            return hit
        self._release(hit.lease.id)
        return MISS

    def _load_plan(self, request: Load) -> TransferPlan:
        page, block = self.layout.page_tokens, self._pools.block_tokens
        found, skip = request.found, request.skip_tokens
        tokens = skip + len(request.blocks) * block
        lease = found.hit.lease
        if lease is None or tokens > found.tokens or skip % block:
            raise InvalidRequest(
                asked=f"load tokens [{skip}, {tokens}) of request {request.id!r}",
                found=f"{found.tokens} can be restored, in blocks of {block}",
                remedy="load at most what was found, in whole blocks",
            )
        records = lease.records[self._group]
        slots = [records[at].slot for at in range(skip // page, -(-tokens // page))]
        return plan_pages(
            self.layout,
            self._group,
            slots,
            dict.fromkeys(self._pools.pools, request.blocks),
            skip_tokens=skip % page,
        )

    def _reserve(
        self,
        filling: _Filling,
        keys: Sequence[PageKey],
        parent: PageKey | None,
        mine: Mapping[PageKey, Sequence[int]],
    ) -> TransferPlan | None:
        """Reserve the missing pages and plan their copies. On the store lane's thread."""
        if not keys:
            return None
        epoch = self._arena.epoch()
        reserved = self._ask(
            "reserve",
            lambda: self._port.reserve(keys, parent=parent, group=self._group),
            None,
        )
        if reserved is None or not reserved.fills:
            return None
        filling.fills = reserved.fills
        with self._open.lock:
            self._open.writing[id(filling)] = tuple(fill.ref for fill in reserved.fills)
        if self._arena.epoch() != epoch:
            # As for a lookup: a successor may give these slots to somebody else.
            raise StaleEpoch(
                asked=f"store {len(reserved.fills)} pages",
                found="the pool was restarted while they were reserved",
                remedy="nothing: they are stored when they are computed again",
            )
        blocks = [block for fill in reserved.fills for block in mine[fill.key]]
        return plan_pages(
            self.layout,
            self._group,
            slots_of([fill.ref for fill in reserved.fills]),
            dict.fromkeys(self._pools.pools, blocks),
        )

    def _seal(self, filling: _Filling) -> None:
        """A store was given up; its copies may still land."""
        if filling.fills:
            refs = [fill.ref for fill in filling.fills]
            self._ask("abort", lambda: self._port.abort(refs, sealed=True), None)
            filling.sealed = True

    def _settle(self, ticket: Ticket, filling: _Filling, outcome: Outcome) -> None:
        """No copy of a store can land any more: commit what is whole, free what isn't."""
        if not filling.fills:
            return
        refs = [fill.ref for fill in filling.fills]
        if filling.sealed:
            self._ask("unseal", lambda: self._port.unseal(refs), None)
        elif outcome.done:
            keys = [fill.key for fill in filling.fills]
            sums = ticket.sums[self._group].tolist()
            digests = placed_sums(self.layout, sums, refs, keys)
            self._ask("commit", lambda: self._port.commit(refs, digests), 0)
        else:
            self._ask("abort", lambda: self._port.abort(refs, sealed=False), None)
        with self._open.lock:
            del self._open.writing[id(filling)]

    def _release(self, lease: int) -> None:
        with self._open.lock:
            if self._open.reading.pop(lease, None) is None:
                return
        self._ask("release", lambda: self._port.release(lease), None)
