"""The port within one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from arenas import keys, open_owner, plain_layout
from rayhicache.core.slots import SlotRef
from rayhicache.errors import PoolUnreachable, SessionEnded, StaleSlot, UnknownLease
from rayhicache.memory.local import LocalPort
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.port import OpenSlots, Port

NOTHING = OpenSlots(reading=(), writing=())


def opened(owner: ArenaOwner) -> Port:
    port = LocalPort(owner, client="test")
    port.attach(plain_layout(), lambda: NOTHING)
    return port


def stored(port: Port, *numbers: int) -> list[SlotRef]:
    reserved = port.reserve(keys(*numbers), parent=None)
    assert reserved is not None
    made = [fill.ref for fill in reserved.fills]
    assert port.commit(made, ()) == len(numbers)
    return made


def test_a_page_lives_through_the_port(root: Path) -> None:
    owner = open_owner(root)
    port = opened(owner)
    stored(port, 1, 2)
    hit = port.lookup(keys(1, 2, 3))
    assert hit.best == 2
    assert hit.lease is not None
    port.release(hit.lease.id)
    with pytest.raises(UnknownLease):
        port.release(hit.lease.id)
    reserved = port.reserve(keys(3), parent=keys(2)[0])
    assert reserved is not None
    sealed = [fill.ref for fill in reserved.fills]
    port.abort(sealed, sealed=True)
    port.unseal(sealed)
    with pytest.raises(StaleSlot):
        port.unseal(sealed)
    port.doubt(keys(1))
    assert port.lookup(keys(1, 2)).best == 0
    owner.check()
    owner.close(unlink=True)


def test_close_ends_the_session_once_and_all_that_it_holds(root: Path) -> None:
    owner = open_owner(root)
    port = opened(owner)
    stored(port, 1)
    port.lookup(keys(1))
    port.reserve(keys(2), parent=None)
    port.close()
    port.close()
    assert (owner.stats().leases, owner.stats().filling, owner.sessions()) == (0, 0, ())
    with pytest.raises(SessionEnded):
        port.lookup(keys(1))
    owner.close(unlink=True)


def test_a_closed_owner_is_out_of_reach(root: Path) -> None:
    owner = open_owner(root)
    port = opened(owner)
    owner.close(unlink=True)
    with pytest.raises(PoolUnreachable):
        port.lookup(keys(1))
    with pytest.raises(PoolUnreachable):
        LocalPort(owner).attach(plain_layout(), lambda: NOTHING)
    port.close()


def test_leases_go_on_under_their_old_ids_after_restarts(root: Path) -> None:
    owner = open_owner(root)
    port = LocalPort(owner)
    reading: list[SlotRef] = []
    port.attach(plain_layout(), lambda: OpenSlots(reading=tuple(reading), writing=()))
    stored(port, 1, 2, 3)
    leases = []
    for number in (1, 2):
        lease = port.lookup(keys(number)).lease
        assert lease is not None
        leases.append(lease.id)
        reading += lease.refs()
    for _ in range(2):
        owner.close(unlink=False)
        owner = open_owner(root)
        port.reconnect(owner)
        assert (owner.stats().leases, owner.stats().leased) == (1, 2)
    later = port.lookup(keys(3)).lease
    assert later is not None
    port.release(leases[0])
    assert owner.stats().leases == 2, "the other one is still read under"
    port.release(leases[1])
    port.release(later.id)
    assert owner.stats().leases == 0
    owner.check()
    owner.close(unlink=True)
