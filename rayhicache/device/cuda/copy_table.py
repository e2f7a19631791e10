"""Tables of copies: which way serves which fragment size, by GPU, as small JSON files.

    {
      "format": 1,
      "gpu": "NVIDIA H200",
      "load":  [{"up_to_bytes": 24575, "kernel_share": 1.0}],
      "store": [{"up_to_bytes": 24575, "kernel_share": 1.0}],
      "blocks_beside": 5,
      "blocks_alone": 16
    }

Rows ascend. The first whose `up_to_bytes` isn't smaller than a fragment says which share of such
fragments the kernel moves, the copy engine the rest; above the last row it moves all. Numbers
that are left out are the defaults of `CopyChoice`, which says what each means. The package has
tables for known GPUs; `rayhicache bench` writes one for any other.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Set
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from rayhicache.device.cuda.choice import CopyChoice
from rayhicache.errors import InvalidConfig

log = logging.getLogger(__name__)

FORMAT = 1
NUMBERS = [one.name for one in fields(CopyChoice) if one.name not in ("load", "store")]
ROW_FIELDS = frozenset({"up_to_bytes", "kernel_share"})
BLOCKS_MAX = 1024
ALL_BYTES = 1 << 40
ROWS_MAX = 64
BYTES_MAX = 1 << 20

CAUTIOUS = CopyChoice(
    load=((16_383, 1.0),), store=((16_383, 1.0),), blocks_beside=4, blocks_alone=8
)
"""For an unknown GPU: the kernel only where the copy engine is far from the link, in few blocks."""

PACKAGED = {"H200": "h200.json"}
"""By a word of the GPU's name. An H200 of another form factor has the same link and engines."""


def choice_for(gpu: str, path: str = "") -> CopyChoice:
    """The choice for a GPU: of the file at `path` if there is one named, else the packaged one.

    An unknown GPU gets a cautious one, with one log line that says what to do.

    Args:
        gpu: its name, as in `NVIDIA H200`.

    Raises:
        InvalidConfig: the file can't be read, or is broken.
    """
    if path:
        measured, choice = read_table(Path(path))
        if measured != gpu:
            log.warning("the table of copies %s was measured on %s, not on %s", path, measured, gpu)
        return choice
    words = set(re.split(r"[^A-Za-z0-9]+", gpu))
    for word, name in PACKAGED.items():
        if word in words:
            packaged = resources.files("rayhicache.device.cuda") / "tables" / name
            return parse_table(packaged.read_text(encoding="utf-8"), name)[1]
    log.warning(
        "no table of copies is known for %s, so a cautious one is used: `rayhicache bench` "
        "measures one on this machine",
        gpu,
    )
    return CAUTIOUS


def read_table(path: Path) -> tuple[str, CopyChoice]:
    """The GPU's name and the choice of a file.

    Raises:
        InvalidConfig: it can't be read, or is broken.
    """
    try:
        if path.stat().st_size > BYTES_MAX:
            raise _broken(str(path), f"it is larger than {BYTES_MAX:,} B")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise _broken(str(path), f"it can't be read: {fault}") from fault
    return parse_table(text, str(path))


def parse_table(text: str, source: str) -> tuple[str, CopyChoice]:
    """The GPU's name and the choice of a table's text.

    Args:
        source: what the text is of, for the message.

    Raises:
        InvalidConfig: it is no table, or a value is out of its range.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise _broken(source, f"it is no JSON: {fault}") from fault
    table = _object(found, {"format", "gpu", "load", "store"}, NUMBERS, source, "the table")
    if table["format"] != FORMAT or isinstance(table["format"], bool):
        raise _broken(source, f"format is {table['format']!r}, not {FORMAT}")
    if not isinstance(table["gpu"], str) or not table["gpu"]:
        raise _broken(source, "gpu is no name")
    numbers = {name: table[name] for name in NUMBERS if name in table}
    for name, value in numbers.items():
        highest = BLOCKS_MAX if name.startswith("blocks_") else ALL_BYTES
        if not _is_integer(value, 1, highest):
            raise _broken(source, f"{name} is no integer from 1 to {highest}")
    choice = CopyChoice(
        load=_rows(table["load"], source, "load"),
        store=_rows(table["store"], source, "store"),
        **numbers,
    )
    return table["gpu"], choice


def table_text(gpu: str, choice: CopyChoice) -> str:
    """A table as the text of its file; `parse_table` gives back the same."""
    sides = {
        name: [{"up_to_bytes": size, "kernel_share": share} for size, share in shares]
        for name, shares in (("load", choice.load), ("store", choice.store))
    }
    numbers = {name: getattr(choice, name) for name in NUMBERS}
    return json.dumps({"format": FORMAT, "gpu": gpu, **sides, **numbers}, indent=2) + "\n"


def _rows(found: Any, source: str, side: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(found, list) or len(found) > ROWS_MAX:
        raise _broken(source, f"{side} is no list of at most {ROWS_MAX} rows")
    rows: list[tuple[int, float]] = []
    for at, row in enumerate(found):
        here = f"row {at} of {side}"
        values = _object(row, ROW_FIELDS, (), source, here)
        size, share = values["up_to_bytes"], values["kernel_share"]
        if not _is_integer(size, 1, ALL_BYTES):
            raise _broken(source, f"up_to_bytes in {here} is no integer from 1 to 2^40")
        if rows and size <= rows[-1][0]:
            raise _broken(source, f"{here} isn't larger than the one before")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise _broken(source, f"kernel_share in {here} is no number from 0 to 1")
        rows.append((size, float(share)))
    return tuple(rows)


def _object(
    found: Any, needed: Set[str], optional: Collection[str], source: str, what: str
) -> dict[str, Any]:
    if not isinstance(found, dict) or not needed <= set(found) <= {*needed, *optional}:
        raise _broken(source, f"{what} isn't an object with {', '.join(sorted(needed))}")
    return found


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _broken(source: str, found: str) -> InvalidConfig:
    return InvalidConfig(
        asked=f"read the table of copies {source}",
        found=found,
        remedy="write it anew with `rayhicache bench`, or leave copy_table out",
    )
