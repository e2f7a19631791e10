"""What a worker sees: the same memory, and a hint of what is in it without a call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arenas import content, hybrid_layout, keys, open_owner, plain_layout, record_bytes, store
from rayhicache.errors import ArenaError
from rayhicache.memory.process import this_process
from rayhicache.memory.view import ArenaView


def test_bytes_written_through_a_view_are_the_records(root: Path) -> None:
    owner = open_owner(root)
    attachment = owner.attach(plain_layout(), this_process())
    view = ArenaView.open(attachment)
    reserved = owner.reserve(keys(1), attachment.session)
    assert reserved is not None
    (ref,) = (fill.ref for fill in reserved.fills)
    nbytes = record_bytes(owner)
    data = content(keys(1)[0], nbytes)
    view.region("full")[ref.slot * nbytes : (ref.slot + 1) * nbytes] = data
    owner.commit([ref], attachment.session)
    assert owner.view(ref, 0, nbytes) == data
    assert owner.view(ref, 16, 32) == data[16:48]
    view.close()
    view.close()
    owner.close(unlink=True)


def test_a_view_outlives_its_owner_and_sees_the_next_epoch(root: Path) -> None:
    owner = open_owner(root)
    attachment = owner.attach(plain_layout(), this_process())
    store(owner, attachment.session, keys(1))
    view = ArenaView.open(attachment)
    region = view.region("full")
    before = bytes(region)
    owner.close(unlink=False)
    assert view.epoch() == attachment.epoch == 1
    successor = open_owner(root)
    assert view.epoch() == 2
    successor.close(unlink=True)
    assert bytes(region) == before
    view.close()


def test_the_probe_follows_what_is_stored_doubted_and_evicted(root: Path) -> None:
    owner = open_owner(root)
    attachment = owner.attach(plain_layout(), this_process())
    view = ArenaView.open(attachment)
    pages = keys(1, 2, 3, 4)
    reserved = owner.reserve(pages, attachment.session)
    assert reserved is not None
    assert view.probe(pages) == 0
    owner.commit([fill.ref for fill in reserved.fills[:3]], attachment.session)
    assert view.probe(pages) == 3
    hit = owner.lookup(pages[:2], attachment.session)
    owner.doubt(pages[1:2])
    assert view.probe(pages) == 1, "not even while a lease still holds it"
    assert hit.lease is not None
    owner.release(hit.lease.id)
    for number in range(100, 120):
        store(owner, attachment.session, keys(number))
        owner.check()
    assert view.probe(pages) == 0
    assert sum(view.probe(keys(number)) for number in range(100, 120)) == owner.stats().ready
    view.close()
    owner.close(unlink=True)


def test_groups_with_the_same_page_key_are_probed_apart(root: Path) -> None:
    owner = open_owner(root)
    attachment = owner.attach(hybrid_layout(), this_process())
    view = ArenaView.open(attachment)
    reserved = owner.reserve(keys(1), attachment.session, group="state")
    assert reserved is not None
    owner.commit([fill.ref for fill in reserved.fills], attachment.session)
    assert (view.probe(keys(1), "state"), view.probe(keys(1), "full")) == (1, 0)
    view.close()
    owner.close(unlink=True)


def test_another_file_than_the_owner_named_is_refused(root: Path) -> None:
    owner = open_owner(root)
    attachment = owner.attach(plain_layout(), this_process())
    for wrong in (
        replace(attachment, inode=attachment.inode + 1),
        replace(attachment, uuid=b"another arena..."),
        replace(attachment, path=attachment.path + "x"),
    ):
        with pytest.raises(ArenaError, match="attach again"):
            ArenaView.open(wrong)
    owner.close(unlink=True)
    with pytest.raises(ArenaError, match="attach again"):
        ArenaView.open(attachment)
