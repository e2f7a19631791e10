"""The command line: `rayhicache up | status | down | bench`.

Each command prints what it did and returns 0. A fault of the tier is told in three sentences on
stderr and returns 1; a command that can't be understood returns 2.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from rayhicache.cli.arguments import make_parser
from rayhicache.errors import RayHiCacheError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code of the process.

    Raises:
        SystemExit: with 2 for a command that can't be understood, with 0 for `--help`.
    """
    arguments = make_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except RayHiCacheError as fault:
        print(f"Asked: {fault.asked}.", file=sys.stderr)
        print(f"Found: {fault.found.rstrip('.')}.", file=sys.stderr)
        print(f"What to do: {fault.remedy}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code
