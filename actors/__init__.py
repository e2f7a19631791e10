"""The processes of a tier on Ray: the only package that imports `ray`.

The folder lies beside the library and is imported as `rayhicache.actors`, through a committed
symlink. Imported as plain `actors` each module would exist twice, with two of every class.
"""

from __future__ import annotations

if __name__ != "rayhicache.actors":
    raise ImportError(f"imported as {__name__!r}: write `import rayhicache.actors` instead")

# Whatever actor or caller is imported, the messages between them are in the table.
import rayhicache.actors.messages  # noqa: F401  # after the refusal, for its effect
