"""What travels comes back equal; whatever else comes is one typed error."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhicache.core.directory import Announcement
from rayhicache.core.hits import MISS, Hit, Lease
from rayhicache.core.keys import PageKey
from rayhicache.core.layout import (
    ComponentSpec,
    GroupSpec,
    HitPolicy,
    PoolSpec,
    RecordLayout,
    Sharding,
)
from rayhicache.core.outcomes import Fill, Reserved, TierStats
from rayhicache.core.slots import Region, Session, SlotRef
from rayhicache.errors import MessageError
from rayhicache.wire.codec import VERSION, decode, encode, register, registered
from rayhicache.wire.messages import MESSAGES, Commit, Refs, pack_keys, unpack_keys


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "big"))


LAYOUT = RecordLayout(
    page_tokens=64,
    pools=(
        PoolSpec(
            name="kv",
            layer_ids=(3, 7),
            components=(ComponentSpec(name="k", block_bytes=0, dtype="bf16"),),
            block_tokens=16,
            sharding=Sharding.PER_RANK,
        ),
        PoolSpec(
            name="local",
            layer_ids=(1,),
            components=(ComponentSpec(name="k", block_bytes=9, dtype="u8"),),
            block_tokens=64,
            group="w",
        ),
    ),
    groups=(GroupSpec(), GroupSpec(name="w", policy=HitPolicy.TRAILING_PAGES, window_tokens=99)),
    num_ranks=2,
)
LEASE = Lease(
    id=5,
    session=1,
    records={"full": {0: SlotRef(7, 1), 1: SlotRef(3, 2**40)}, "w": {1: SlotRef(9, 4)}},
    deadline=2.5,
)
SAMPLES: list[object] = [
    LAYOUT,
    LEASE,
    Lease(id=1, session=2, records={}),
    Session(id=1, pid=2, start_time=3, pid_namespace=4, client="ü"),
    Region(group="full", first_slot=0, num_slots=2, record_bytes=64, offset=4096),
    MISS,
    Hit(lengths=range(1, 2001), lease=LEASE, pulled=3),
    Hit(lengths=(2, 5), lease=None),
    Reserved(
        fills=(Fill(group="full", key=key(1), ref=SlotRef(1, 1)),), ready=(key(2),), filling=()
    ),
    TierStats(**{field.name: at for at, field in enumerate(fields(TierStats))}),
    Announcement(seat="a", epoch=1, whole=True, stored=(key(1),), removed=()),
    Refs(refs=(SlotRef(1, 2),)),
    Commit(refs=(SlotRef(1, 2),), digests=((2**64 - 1, 0),)),
]


def name_of(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_a_message_comes_back_equal(message: object) -> None:
    back = decode(encode(message), type(message))
    assert back == message
    assert hash(type(back)) == hash(type(message))


def test_every_message_of_the_table_has_a_sample() -> None:
    assert {type(message) for message in SAMPLES} == set(MESSAGES.values())
    assert registered().items() >= MESSAGES.items()


def test_a_range_of_lengths_stays_a_range_and_a_list_becomes_a_tuple() -> None:
    assert decode(encode(Hit(lengths=range(1, 9), lease=None)), Hit).lengths == range(1, 9)
    assert decode(encode(Hit(lengths=[2, 5], lease=None)), Hit).lengths == (2, 5)


def test_a_restored_layout_has_the_same_fingerprint() -> None:
    assert decode(encode(LAYOUT), RecordLayout).fingerprint() == LAYOUT.fingerprint()


def test_answers_about_two_thousand_pages_stay_under_100_kilobytes() -> None:
    refs = tuple(SlotRef(1_000_000 + at, 2**31 + at) for at in range(2000))
    lease = Lease(id=2**50, session=9, records={"full": dict(enumerate(refs))})
    hit = encode(Hit(lengths=range(1, 2001), lease=lease))
    digests = tuple((2**64 - 1,) * 4 for _ in refs)
    fills = tuple(Fill(group="full", key=key(at), ref=ref) for at, ref in enumerate(refs))
    reserved = encode(Reserved(fills=fills, ready=(), filling=()))
    commit = encode(Commit(refs=refs, digests=digests))
    assert max(len(hit), len(reserved), len(commit)) < 100_000


WRONG: list[object] = [
    Session(id=True, pid=2, start_time=3, pid_namespace=4, client="x"),
    Session(id="1", pid=2, start_time=3, pid_namespace=4, client="x"),  # type: ignore[arg-type]  # wrong on purpose
    Session(id=2**64, pid=2, start_time=3, pid_namespace=4, client="x"),
    Session(id=1, pid=2, start_time=3, pid_namespace=4, client=b"x"),  # type: ignore[arg-type]  # wrong on purpose
    Refs(refs=[SlotRef(1, 2)]),  # type: ignore[arg-type]  # wrong on purpose
    Refs(refs=((1, 2),)),  # type: ignore[arg-type]  # wrong on purpose
    Lease(id=1, session=1, records=(), deadline=None),  # type: ignore[arg-type]  # wrong on purpose
    Lease(id=1, session=1, records={}, deadline="soon"),  # type: ignore[arg-type]  # wrong on purpose
    Announcement(seat="a", epoch=1, whole=1, stored=(), removed=()),  # type: ignore[arg-type]  # wrong on purpose
]


@pytest.mark.parametrize("message", WRONG, ids=name_of)
def test_a_field_of_another_type_is_refused_when_it_is_sent(message: object) -> None:
    with pytest.raises(MessageError):
        encode(message)


def raw(name: object, body: object, *, version: int = VERSION) -> bytes:
    packed: bytes = msgpack.packb([name, body])
    return bytes([version]) + packed


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "version missing"),
        (raw("refs", [[]], version=2), "version 02"),
        (raw("nothing", [[]]), "'nothing' where 'refs'"),
        (raw("hit", [[], None, 0]), "'hit' where 'refs'"),
        (raw(7, [[]]), "no pair"),
        (bytes([VERSION]) + msgpack.packb(["refs"]), "no pair"),
        (raw("refs", [[]]) + b"\x00", "no whole"),
        (raw("refs", [[]])[:-1], "no whole"),
        (raw("refs", []), "of 1 fields"),
        (raw("refs", [[], []]), "of 1 fields"),
        (raw("refs", {"refs": []}), "of 1 fields"),
        (raw("refs", ["refs"]), "no sequence"),
        (raw("refs", [[[1]]]), "SlotRef of 2 fields"),
        (raw("refs", [[[1, True]]]), "no integer"),
        (raw("refs", [[[1, 1.0]]]), "no integer"),
        (raw("refs", [{"range": [0, 9, 1]}]), "no sequence"),
        (raw("refs", [msgpack.ExtType(5, b"x")]), "no sequence"),
        (bytes([VERSION]) + b"\x92\xa4refs\x91\x81\x90\x01", "no whole"),
        (bytes([VERSION]) + b"\x91" * 100_000, "no whole"),
    ],
)
def test_bytes_that_are_no_such_message_are_told_apart(data: bytes, said: str) -> None:
    with pytest.raises(MessageError, match=said):
        decode(data, Refs)


@pytest.mark.parametrize("ends", [[0, 2**40, 1], [0, 5, 0], [0, 5], ["0", 5, 1], 7])
def test_a_range_that_never_ends_is_refused(ends: object) -> None:
    with pytest.raises(MessageError):
        decode(raw("hit", [{"range": ends}, None, 0]), Hit)


def test_values_that_the_type_itself_refuses_are_a_message_error() -> None:
    body = msgpack.unpackb(encode(LAYOUT)[1:])[1]
    body[0] = 0
    with pytest.raises(MessageError, match="page_tokens"):
        decode(raw("layout", body), RecordLayout)
    body[0], body[1][0][5] = 64, "sometimes"
    with pytest.raises(MessageError, match="Sharding"):
        decode(raw("layout", body), RecordLayout)


def test_a_message_over_its_limit_is_refused_on_both_sides() -> None:
    message = Refs(refs=(SlotRef(1, 2),) * 100)
    data = encode(message, limit=1000)
    with pytest.raises(MessageError, match="over the limit of 100 B"):
        encode(message, limit=100)
    with pytest.raises(MessageError, match="over the limit of 100 B"):
        decode(data, Refs, limit=100)


class Colour(IntEnum):
    RED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted:
    colour: Colour
    pair: tuple[int, str]
    parts: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsendable:
    anything: object


def test_another_room_adds_its_messages_once_and_unregistered_types_do_not_travel() -> None:
    message = Painted(colour=Colour.RED, pair=(1, "x"), parts={"a": (1.0, 2)})
    with pytest.raises(MessageError, match="Painted is not in the table"):
        encode(message)
    register({"test painted": Painted})
    register({"test painted": Painted})
    assert decode(encode(message), Painted) == message
    with pytest.raises(AssertionError, match="names another"):
        register({"refs": Painted})
    with pytest.raises(MessageError, match="'Unsendable' was expected"):
        decode(encode(message), Unsendable)


def test_a_type_that_cannot_travel_is_refused_when_it_is_registered() -> None:
    with pytest.raises(TypeError, match="can't be sent"):
        register({"test unsendable": Unsendable})


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_error(data: bytes) -> None:
    for kind in MESSAGES.values():
        for head in (b"", bytes([VERSION])):
            with pytest.raises(MessageError):
                decode(head + data, kind)


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_a_mutated_message_is_a_message_of_its_type_or_a_message_error(message: object) -> None:
    chance = random.Random(1)
    data = encode(message)
    for _ in range(2000):
        mutated = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(mutated))
            mutated[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        try:
            back = decode(bytes(mutated), type(message))
        except MessageError:
            continue
        assert type(back) is type(message)
        assert decode(encode(back), type(back)) == back or b"\xcb" in mutated


def test_keys_travel_as_one_blob() -> None:
    keys = [key(1), key(2)]
    assert len(pack_keys(keys)) == 32
    assert unpack_keys(pack_keys(keys)) == keys
    assert unpack_keys(b"") == []
    with pytest.raises(MessageError):
        unpack_keys(bytes(17))
    with pytest.raises(MessageError):
        pack_keys([PageKey(b"short")])
