"""Log lines that say whose they are: tier, node and epoch before every message."""

from __future__ import annotations

import logging


class _Context(logging.Filter):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"{self._prefix} {record.msg}"
        return True


def name_process(*, tier: str, node: str, epoch: int) -> None:
    """Put tier, node and epoch before each line that `rayhicache` logs in this process.

    Called once more with another epoch it replaces the earlier words. Messages of the copier name
    their ticket themselves.
    """
    logger = logging.getLogger("rayhicache")
    if not logger.handlers:
        output = logging.StreamHandler()
        output.setFormatter(logging.Formatter("%(levelname)s %(message)s [%(name)s]"))
        logger.addHandler(output)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    for handler in logger.handlers:
        for old in list(handler.filters):
            if isinstance(old, _Context):
                handler.removeFilter(old)
        handler.addFilter(_Context(f"tier={tier} node={node} epoch={epoch}"))
