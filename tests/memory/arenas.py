"""Words of the domain for tests: roots, owners, records whose bytes derive from their key."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from rayhicache.core.keys import PageKey
from rayhicache.core.layout import ComponentSpec, GroupSpec, HitPolicy, PoolSpec, RecordLayout
from rayhicache.core.outcomes import Reserved
from rayhicache.core.slots import Session, SlotRef
from rayhicache.memory.arena import Arena
from rayhicache.memory.owner import ArenaOwner
from rayhicache.memory.process import (
    ProcessIdentity,
    own_pid_namespace,
    start_time_of,
    this_process,
)

TIER, SEAT = "tier", "seat-0"
SMALL = 128 << 10
NOBODY = ProcessIdentity(pid=1, start_time=1, pid_namespace=1)


def key(number: int) -> PageKey:
    return PageKey(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest())


def keys(*numbers: int) -> list[PageKey]:
    return [key(number) for number in numbers]


def plain_layout(*, num_stages: int = 1, record_bytes: int = 8192) -> RecordLayout:
    kv = PoolSpec(
        name="kv",
        layer_ids=(0, 1),
        components=(ComponentSpec(name="rows", block_bytes=record_bytes // 2, dtype="uint8"),),
        block_tokens=4,
    )
    return RecordLayout(page_tokens=4, pools=(kv,), num_stages=num_stages, num_layer_groups=2)


def hybrid_layout() -> RecordLayout:
    full = plain_layout().pools[0]
    state = PoolSpec(
        name="state",
        layer_ids=(2,),
        components=(ComponentSpec(name="recurrent", block_bytes=640, dtype="float32"),),
        block_tokens=4,
        group="state",
    )
    groups = (GroupSpec(), GroupSpec(name="state", policy=HitPolicy.SNAPSHOT, arena_share=0.5))
    return RecordLayout(page_tokens=4, pools=(full, state), groups=groups)


def open_arena(root: Path, capacity_bytes: int = SMALL) -> Arena:
    return Arena.create_or_adopt(root, TIER, SEAT, capacity_bytes)


def open_owner(root: Path, capacity_bytes: int = SMALL, **options: Any) -> ArenaOwner:
    return ArenaOwner(open_arena(root, capacity_bytes), **options)


def attach(owner: ArenaOwner) -> int:
    """This process attaches once more; the session's id."""
    return owner.attach(plain_layout(), this_process("test")).session


def content(page: PageKey, nbytes: int) -> bytes:
    return hashlib.shake_128(page).digest(nbytes)


def record_bytes(owner: ArenaOwner) -> int:
    assert owner.layout is not None
    return owner.layout.shape().nbytes


def digests_of(data: bytes | memoryview) -> tuple[int, ...]:
    half = len(data) // 2
    return tuple(
        int.from_bytes(hashlib.blake2b(part, digest_size=8).digest(), "little")
        for part in (data[:half], data[half:])
    )


def fill(owner: ArenaOwner, reserved: Reserved | None) -> list[SlotRef]:
    """Write the records' bytes; not committed."""
    assert reserved is not None
    nbytes = record_bytes(owner)
    for each in reserved.fills:
        owner.view(each.ref, 0, nbytes)[:] = content(each.key, nbytes)
    return [each.ref for each in reserved.fills]


def store(owner: ArenaOwner, session: int, pages: Sequence[PageKey]) -> list[SlotRef]:
    refs = fill(owner, owner.reserve(pages, session))
    nbytes = record_bytes(owner)
    digests = [digests_of(owner.view(ref, 0, nbytes)) for ref in refs]
    owner.commit(refs, session, digests=digests)
    return refs


def wrong_pages(owner: ArenaOwner, session: int, pages: Sequence[PageKey]) -> list[PageKey]:
    """Those of some pages that are found with other bytes than their own."""
    nbytes = record_bytes(owner)
    wrong = []
    for page in pages:
        hit = owner.lookup([page], session)
        if hit.lease is None:
            continue
        (ref,) = hit.lease.refs()
        if owner.view(ref, 0, nbytes) != content(page, nbytes):
            wrong.append(page)
        owner.release(hit.lease.id)
    return wrong


def files_under(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def eventually(holds: Callable[[], bool], *, within: float = 10.0) -> bool:
    """Ask again until it holds; for what another thread does in its own time."""
    pause = Event()
    for _ in range(int(within / 0.005)):
        if holds():
            return True
        pause.wait(0.005)
    return holds()


@dataclass(slots=True)
class Bystander:
    """A process that lives until it is killed and does nothing: somebody to attach."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls) -> Bystander:
        command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE))

    @property
    def identity(self) -> ProcessIdentity:
        start_time = start_time_of(self.process.pid)
        assert start_time is not None
        return ProcessIdentity(
            pid=self.process.pid,
            start_time=start_time,
            pid_namespace=own_pid_namespace(),
            client="bystander",
        )

    def kill(self) -> None:
        """kill -9, and gone when this returns."""
        self.process.kill()
        self.process.communicate()


class OwnerProcess:
    """`owner_process.py` as a process of its own, to be killed. Close it with `kill`."""

    def __init__(self, root: Path, *words: str) -> None:
        script = Path(__file__).with_name("owner_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(root), *words],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )

    def tells(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        assert isinstance(said, dict)
        return said

    def kill(self) -> list[dict[str, Any]]:
        """kill -9 in the middle of whatever it does; what it had said and nobody had heard."""
        self.process.kill()
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        # Not `communicate`: it passes over what `tells` has buffered.
        unheard = self.process.stdout.read()
        self.process.wait()
        self.process.stdout.close()
        self.process.stdin.close()
        return [json.loads(line) for line in unheard.splitlines(keepends=True) if "\n" in line]


def session_of(identity: ProcessIdentity, number: int) -> Session:
    return Session(
        id=number,
        pid=identity.pid,
        start_time=identity.start_time,
        pid_namespace=identity.pid_namespace,
        client=identity.client,
    )
