"""Limits of the copier and of its lanes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Limits of the copier.

    Attributes:
        tickets_max: open tickets a lane; the next one waits for room.
        submit_seconds: how long it waits.
        wait_seconds: how long a reader may block for a layer that isn't enqueued.
        copy_seconds: after this a copy is given up; its pages stay sealed until it has passed.
        ring_indices: indices that the pinned ring holds.
    """

    tickets_max: int = 64
    submit_seconds: float = 10.0
    wait_seconds: float = 30.0
    copy_seconds: float = 60.0
    ring_indices: int = 1 << 16
