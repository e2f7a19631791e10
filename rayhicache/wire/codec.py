"""Messages as bytes and back: one version byte, then msgpack of [name, fields].

Only types of the table travel, so bytes from outside can make nothing else. Never pickle. Each
room registers its own messages when it is imported; a process that lacks one refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack

from rayhicache.errors import MessageError
from rayhicache.wire.fields import Way, refused, way_of

VERSION = 1
MESSAGE_BYTES_MAX = 32 * 1024 * 1024

T = TypeVar("T")

_types: dict[str, type] = {}
_names: dict[type, str] = {}
_ways: dict[str, Way] = {}


def register(table: Mapping[str, type]) -> None:
    """Let these frozen dataclasses travel under these names. Twice the same does nothing.

    Call it at import, before other threads encode.

    Raises:
        TypeError: a field's type can't be sent.
    """
    for name, kind in table.items():
        assert _types.get(name, kind) is kind, f"{name!r} names another message"
        assert _names.get(kind, name) == name, f"{kind} has another name"
        _ways[name] = way_of(kind)
        _types[name], _names[kind] = kind, name


def registered() -> Mapping[str, type]:
    """The table of messages, by name."""
    return dict(_types)


def encode(message: object, *, limit: int = MESSAGE_BYTES_MAX) -> bytes:
    """A registered message as bytes.

    Raises:
        MessageError: not registered, a field that isn't of its declared type, or over `limit`.
    """
    name = _names.get(type(message))
    if name is None:
        raise refused(f"{type(message).__name__} is not in the table of messages")
    data: bytes = bytes([VERSION]) + msgpack.packb([name, _ways[name].pack(message)])
    if len(data) > limit:
        raise refused(f"a {name!r} of {len(data):,} B is over the limit of {limit:,} B")
    return data


def decode(data: bytes, kind: type[T], *, limit: int = MESSAGE_BYTES_MAX) -> T:
    """The message that must be of this type.

    Raises:
        MessageError: another version or type, over `limit`, trailing bytes, or fields that
            aren't of their declared types. Whatever the bytes, nothing else is raised.
    """
    if len(data) > limit:
        raise refused(f"{len(data):,} B are over the limit of {limit:,} B")
    if not data or data[0] != VERSION:
        raise refused(f"version {data[:1].hex() or 'missing'} instead of {VERSION:02x}")
    name, body = _parts(data)
    wanted = _names.get(kind)
    if wanted is None or name != wanted:
        raise refused(f"a message {name!r} where {wanted or kind.__name__!r} was expected")
    message = _ways[name].unpack(body)
    assert isinstance(message, kind)
    return message


def _parts(data: bytes) -> tuple[str, Any]:
    try:
        parts = msgpack.unpackb(memoryview(data)[1:], strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as fault:
        raise _broken(fault) from fault
    if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not str:
        raise refused("no pair of a name and fields")
    return parts[0], parts[1]


def _broken(fault: Exception) -> MessageError:
    return refused(f"no whole msgpack value ({type(fault).__name__})")
