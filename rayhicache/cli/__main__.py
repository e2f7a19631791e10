"""`python -m rayhicache.cli`, where the command `rayhicache` isn't on the path."""

from __future__ import annotations

import sys

from rayhicache.cli import main

if __name__ == "__main__":
    sys.exit(main())
