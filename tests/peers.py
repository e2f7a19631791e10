"""Words for tests of the transport: nodes in one process, each with an arena and a puller."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayhicache.core.keys import PageKey
from rayhicache.core.layout import RecordLayout
from rayhicache.memory.arena import Arena
from rayhicache.memory.digest import is_whole
from rayhicache.memory.local import LocalPort
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.port import OpenSlots
from rayhicache.memory.process import this_process
from rayhicache.memory.view import ArenaView
from rayhicache.testing.local_transport import FaultyTransport, LocalTransport
from rayhicache.testing.transport_conformance import Peer, small_layouts
from rayhicache.transport.puller import Puller, PullLimits
from rayhicache.transport.server import PeerServer

LAYOUT = small_layouts()["sparse-index"]
LIMITS = PullLimits(chunk_bytes=1, chunks_in_flight=2, call_seconds=1.0, pull_seconds=10.0)


@contextlib.contextmanager
def owner_of(seat: str, layout: RecordLayout, num_slots: int = 16) -> Iterator[ArenaOwner]:
    """A node's owner on tmpfs, with room for about so many records."""
    root = Path(f"/dev/shm/rhc-{secrets.token_hex(4)}")
    capacity = (192 << 10) + num_slots * layout.shape().nbytes
    owner = ArenaOwner(Arena.create_or_adopt(root, "tier", seat, capacity), verify=is_whole)
    try:
        yield owner
        owner.check()
    finally:
        owner.close(unlink=True)
        shutil.rmtree(root, ignore_errors=True)


def peer_of(owner: ArenaOwner, seat: str, layout: RecordLayout, lease_seconds: float) -> Peer:
    """A node as others see it, over a transport of its own that can be made mute."""
    port = LocalPort(owner)
    attachment = port.attach(layout, lambda: OpenSlots(reading=(), writing=()))
    session = owner.attach(layout, this_process("pool")).session
    local = LocalTransport()
    local.connect(seat, PeerServer(owner, seat, lambda: session, lease_seconds=lease_seconds))
    faulty = FaultyTransport(local)

    @contextlib.contextmanager
    def muted() -> Iterator[None]:
        faulty.mute.add(seat)
        yield
        faulty.mute.discard(seat)

    return Peer(
        transport=faulty,
        seat=seat,
        port=port,
        view=ArenaView.open(attachment),
        region=attachment.regions[0],
        layout=layout,
        muted=muted,
        kill=lambda: local.disconnect(seat),
    )


@dataclass(slots=True)
class Told:
    """What a puller told of layer groups, and whether the records were findable then."""

    groups: list[tuple[int, tuple[PageKey, ...]]] = field(default_factory=list)
    changed: threading.Event = field(default_factory=threading.Event)

    def __call__(self, group: int, keys: Sequence[PageKey]) -> None:
        self.groups.append((group, tuple(keys)))
        self.changed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Node B pulls from node A."""

    a: Peer
    a_owner: ArenaOwner
    b_owner: ArenaOwner
    puller: Puller
    transport: FaultyTransport
    told: Told

    def pull(self, keys: Sequence[PageKey], have: int = 0) -> int:
        return self.puller.pull("a", keys, have)

    def found(self, keys: Sequence[PageKey]) -> list[bytes]:
        """The whole records that node B finds of a prefix."""
        session = self.b_owner.attach(LAYOUT, this_process("reader")).session
        hit = self.b_owner.lookup(keys, session)
        refs = hit.lease.refs() if hit.lease else []
        records = [bytes(self.b_owner.view(ref, 0, LAYOUT.shape().nbytes)) for ref in refs]
        self.b_owner.detach(session)
        return records

    def right(self, keys: Sequence[PageKey]) -> list[bytes]:
        """What they should be: padding between fragments travels too."""
        end = self.a.runs[-1].offset + self.a.runs[-1].nbytes
        rest = LAYOUT.shape().nbytes - end
        assert rest < 64
        return [self.a.content(key)[:end] for key in keys]


@contextlib.contextmanager
def two_nodes(limits: PullLimits = LIMITS, *, room: int = 16) -> Iterator[Pair]:
    """Nodes A and B; A's pages are stored with `pair.a.store`."""
    with owner_of("a", LAYOUT) as a_owner, owner_of("b", LAYOUT, room) as b_owner:
        a = peer_of(a_owner, "a", LAYOUT, lease_seconds=60.0)
        session = b_owner.attach(LAYOUT, this_process("pool")).session
        assert isinstance(a.transport, FaultyTransport)
        told = Told()
        puller = Puller(b_owner, a.transport, lambda: session, limits=limits, on_group=told)
        yield Pair(
            a=a,
            a_owner=a_owner,
            b_owner=b_owner,
            puller=puller,
            transport=a.transport,
            told=told,
        )
        puller.close()
