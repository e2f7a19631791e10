"""How the value of a field travels: made once from the field's type, strict in both directions.

A frozen dataclass or named tuple is the array of its fields, so a message carries no names of
fields. What isn't exactly of the declared type is refused: a bool is no int, a list no str.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NewType

from rayhicache.errors import MessageError, RayHiCacheError

INT_MIN, INT_MAX = -(2**63), 2**64 - 1
ITEMS_MAX = 1 << 20
RANGE = "range"

Convert = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Both directions of one type: to what msgpack packs, and back; each may refuse."""

    pack: Convert
    unpack: Convert


def refused(found: str) -> MessageError:
    """A message that can't be used."""
    return MessageError(
        asked="read or write a message",
        found=found,
        remedy="run the same version of rayhicache on both sides",
    )


@lru_cache(maxsize=1024)
def way_of(hint: Any) -> Way:
    """How values of a type travel.

    Raises:
        TypeError: values of this type can't be sent; found out when a message is registered.
    """
    if isinstance(hint, NewType):
        return way_of(hint.__supertype__)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (bool, str, bytes, type(None)):
        return _plain(hint)
    if hint is int:
        return Way(_int, _int)
    if hint is float:
        return Way(_float_out, _plain(float).unpack)
    if origin in (typing.Union, types.UnionType):
        return _optional(hint, args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(args[0], (tuple,))
    if origin is tuple:
        return _fixed(args, lambda values: tuple(values), str(hint))
    if origin is Sequence:
        return _sequence(args[0], (list, tuple, range))
    if origin is Mapping:
        return _mapping(*args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint, [field.name for field in dataclasses.fields(hint)])
    if isinstance(hint, type) and issubclass(hint, tuple) and typing.get_type_hints(hint):
        return _record(hint, list(typing.get_type_hints(hint)))
    raise TypeError(f"values of type {hint} can't be sent")


def _int(value: Any) -> Any:
    if type(value) is not int or not INT_MIN <= value <= INT_MAX:
        raise refused(f"{_short(value)} is no integer of 64 bits")
    return value


def _float_out(value: Any) -> Any:
    if type(value) not in (int, float):
        raise refused(f"{_short(value)} is no number")
    return float(value)


def _plain(kind: type) -> Way:
    def same(value: Any) -> Any:
        if type(value) is not kind:
            raise refused(f"{_short(value)} is no {kind.__name__}")
        return value

    return Way(same, same)


def _optional(hint: Any, args: tuple[Any, ...]) -> Way:
    kinds = [arg for arg in args if arg is not type(None)]
    if len(kinds) != 1:
        raise TypeError(f"only one type or None can be sent, not {hint}")
    way = way_of(kinds[0])
    return Way(
        lambda value: None if value is None else way.pack(value),
        lambda value: None if value is None else way.unpack(value),
    )


def _sequence(item: Any, kinds: tuple[type[Sequence[Any]], ...]) -> Way:
    """A tuple, or where the type says `Sequence` a list or range too; a range stays one."""
    way = way_of(item)
    ranges = range in kinds and item is int

    def pack(values: Any) -> Any:
        if not isinstance(values, kinds):
            raise refused(f"{_short(values)} is no sequence")
        if ranges and isinstance(values, range):
            return {RANGE: [_int(x) for x in (values.start, values.stop, values.step)]}
        return [way.pack(value) for value in values]

    def unpack(values: Any) -> Any:
        if ranges and type(values) is dict:
            return _range(values)
        if type(values) is not list:
            raise refused(f"{_short(values)} is no sequence")
        return tuple([way.unpack(value) for value in values])

    return Way(pack, unpack)


def _range(values: dict[Any, Any]) -> range:
    ends = values.get(RANGE)
    if len(values) != 1 or type(ends) is not list or len(ends) != 3:
        raise refused(f"{_short(values)} is no range")
    start, stop, step = (_int(end) for end in ends)
    if not step or (stop - start) // step > ITEMS_MAX:
        raise refused(f"range {_short(ends)} has no step or is too long")
    return range(start, stop, step)


def _mapping(key: Any, item: Any) -> Way:
    keys, items = way_of(key), way_of(item)

    def pack(values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise refused(f"{_short(values)} is no mapping")
        return {keys.pack(k): items.pack(v) for k, v in values.items()}

    def unpack(values: Any) -> Any:
        if type(values) is not dict:
            raise refused(f"{_short(values)} is no mapping")
        return {keys.unpack(k): items.unpack(v) for k, v in values.items()}

    return Way(pack, unpack)


def _enum(kind: type[Enum]) -> Way:
    def pack(value: Any) -> Any:
        if type(value) is not kind:
            raise refused(f"{_short(value)} is no {kind.__name__}")
        return value.value

    def unpack(value: Any) -> Any:
        for member in kind:
            if type(member.value) is type(value) and member.value == value:
                return member
        raise refused(f"{_short(value)} is no {kind.__name__}")

    return Way(pack, unpack)


def _record(kind: type, names: Sequence[str]) -> Way:
    """A frozen dataclass or a named tuple."""
    hints = typing.get_type_hints(kind)
    fixed = _fixed(
        tuple(hints[name] for name in names),
        lambda values: kind(**dict(zip(names, values, strict=True))),
        kind.__name__,
    )

    def pack(value: Any) -> Any:
        if type(value) is not kind:
            raise refused(f"{_short(value)} is no {kind.__name__}")
        return fixed.pack([getattr(value, name) for name in names])

    return Way(pack, fixed.unpack)


def _fixed(hints: tuple[Any, ...], make: Callable[[list[Any]], Any], name: str) -> Way:
    ways = [way_of(hint) for hint in hints]

    def pack(values: Any) -> Any:
        if not isinstance(values, (list, tuple)) or len(values) != len(ways):
            raise refused(f"{_short(values)} is no {name}")
        return [way.pack(value) for way, value in zip(ways, values, strict=True)]

    def unpack(values: Any) -> Any:
        if type(values) is not list or len(values) != len(ways):
            raise refused(f"{_short(values)} is no {name} of {len(ways)} fields")
        try:
            return make([way.unpack(value) for way, value in zip(ways, values, strict=True)])
        except MessageError:
            raise
        except RayHiCacheError as fault:
            # The type itself refuses such values, as a layout that contradicts itself.
            raise refused(f"no valid {name}: {fault}") from fault

    return Way(pack, unpack)


def _short(value: object) -> str:
    said = repr(value) if isinstance(value, (int, float, bool, type(None))) else ""
    return f"{type(value).__name__} {said}"[:60].strip()
