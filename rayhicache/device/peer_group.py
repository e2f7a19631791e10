"""A group of ranks that move the bytes of replicated pools together, as one of its ranks sees it.

The ranks meet in a folder of shared memory: each says there who it is and how its pools' memory
is reached, opens the others', and says on the board whether it could. Only if all could, they
move together. A rank that ends, or goes by itself for good, ends that for all of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rayhicache.core.layout import Sharding
from rayhicache.core.peers import RELEASED, BoardShape
from rayhicache.device.peer_board import Board, Lock, wait_until
from rayhicache.device.protocols import Stream
from rayhicache.device.space import PoolMemory
from rayhicache.errors import PeerMismatch, PeerUnreachable
from rayhicache.memory.folder import make_private
from rayhicache.memory.process import ProcessIdentity, ProcessWatcher, this_process

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_REACHED, _UNREACHED = 1, 2
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeat:
    """One rank's place in its group.

    Attributes:
        folder: in shared memory (`/dev/shm/...`), of this life of this group and no other; its
            files are gone once the ranks are connected.
        rank, num_ranks: in the tensor-parallel group; all on one node.
    """

    folder: Path
    rank: int
    num_ranks: int

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, the next one first, so that not all write to the same at once."""
        return tuple((self.rank + step) % self.num_ranks for step in range(1, self.num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """Limits of a group, the same on all its ranks.

    Attributes:
        connect_seconds: until all ranks have come.
        begin_seconds: until all have come to a transfer; then a rank goes by itself.
        push_seconds: until a peer has enqueued its part of a layer; then the load fails.
        fence_seconds: until work that uses the blocks of a load has passed on every rank.
        ahead: layers that a rank enqueues ahead of the slowest.
        indices_max: rows of all pools of a transfer; ranks move a larger one by themselves.
    """

    connect_seconds: float = 60.0
    begin_seconds: float = 10.0
    push_seconds: float = 10.0
    fence_seconds: float = 30.0
    ahead: int = 16
    indices_max: int = 1 << 16


class Pusher(Protocol):
    """Copies some rows of one pool to the same rows of one peer's."""

    def enqueue(self, stream: Stream, position: int) -> None:
        """Enqueue the layer at `position` of the pool's own. Doesn't block for the copies."""


class PeerBackend(Protocol):
    """How a kind of device reaches the memory of peers, and words that streams of all wait for."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory as `Device.empty`, which can be exported."""

    def export(self, memories: Mapping[str, PoolMemory]) -> Any:
        """What a peer needs to reach these pools; JSON. The caller keeps the pools alive."""

    def open(self, rank: int, exported: Any) -> None:
        """Reach a peer's pools.

        Raises:
            PeerUnreachable: it can't be.
        """

    def map_words(self, board: Board) -> None:
        """Let streams reach the board's words.

        Raises:
            PeerUnreachable: they can't.
        """

    def write_word(self, stream: Stream, offset: int, value: int) -> None:
        """Enqueue the write of a word, after all memory writes before it."""

    def wait_word(self, stream: Stream, offset: int, value: int) -> None:
        """Work enqueued from now on runs once the word is at least `value`.

        On a device whose current stream is the calling thread, that thread blocks.
        """

    def pusher(self, rank: int, pool: str, mine: torch.Tensor, theirs: torch.Tensor) -> Pusher:
        """Copies of blocks of this rank to blocks of a peer, `int64[n]` of the host both.

        Raises:
            PeerUnreachable: the peer has no such block.
        """

    def close(self) -> None:
        """Let go of the peers' memory. Idempotent."""


class PeerGroup:
    """This rank's view of its group. Any thread may call.

    Attributes:
        shared: the pools that are replicated.
        dead: ranks whose processes have ended.
        locks: of each rank, held while it passes a layer on; for the planner thread of loads.
    """

    def __init__(self, seat: PeerSeat, backend: PeerBackend, limits: PeerLimits) -> None:
        self.seat = seat
        self.backend = backend
        self.limits = limits
        self.shared: dict[str, PoolMemory] = {}
        self.dead: set[int] = set()
        self.locks: dict[int, Lock] = {}
        self._board: Board | None = None
        self._apart = "it isn't connected"
        self._lock = threading.Lock()
        self._watcher: ProcessWatcher | None = None

    @property
    def board(self) -> Board:
        """The words; only while the group was connected."""
        assert self._board is not None
        return self._board

    @property
    def apart(self) -> str:
        """Why this rank goes by itself; empty while it moves together with the others."""
        return self._apart

    def connect(self, memories: Mapping[str, PoolMemory]) -> bool:
        """Meet the other ranks; whether all of them now move together. Once. Blocks.

        Where they can't, this rank loads by itself, with one line in the log.

        Raises:
            PeerMismatch: another rank has other pools, another number of ranks or other limits.
        """
        shared = {n: m for n, m in memories.items() if m.spec.sharding is Sharding.REPLICATED}
        if self.seat.num_ranks == 1 or not shared:
            self._apart = "there is nothing to share" if shared else "no pool is replicated"
            return False
        self.shared = shared
        try:
            self._meet(shared)
        except PeerUnreachable as fault:
            if self._board is not None:
                self.board.set_number(self.board.shape.verdict(self.seat.rank), _UNREACHED)
                self.board.set_number(self.board.shape.left(self.seat.rank), 1)
            self._apart = fault.found
            log.warning("rank %d loads by itself: %s", self.seat.rank, fault)
            return False
        self._apart = ""
        return True

    def leave(self, why: str) -> None:
        """Go by itself for good; the others see it. Transfers under way end as they would."""
        with self._lock:
            if self._apart:
                return
            self._apart = why
        self.board.set_number(self.board.shape.left(self.seat.rank), 1)
        log.warning("rank %d loads by itself from now on: %s", self.seat.rank, why)

    def gone(self, rank: int) -> bool:
        """Whether a peer is dead or goes by itself."""
        return rank in self.dead or bool(self.board.number(self.board.shape.left(rank)))

    def collapse(self, why: str) -> None:
        """This rank's streams have failed and touch nothing any more: let the peers go on."""
        self.leave(why)
        for peer in self.seat.peers:
            self._release(self.seat.rank, peer)

    def close(self) -> None:
        """Leave, and let go of everything. No transfer is under way. Idempotent."""
        if self._board is not None:
            self.leave("it was closed")
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        while self.locks:
            self.locks.popitem()[1].close()
        self.backend.close()

    def _meet(self, shared: Mapping[str, PoolMemory]) -> None:
        seat, specs = self.seat, [memory.spec for memory in shared.values()]
        make_private(seat.folder)
        shape = BoardShape(
            num_ranks=seat.num_ranks,
            steps=sum(len(spec.layer_ids) for spec in specs),
            indices_max=self.limits.indices_max,
        )
        alike = blake2b(repr((seat.num_ranks, self.limits, specs)).encode(), digest_size=7)
        # The board is there before the greeting, so whoever is greeted can read it.
        path, mine = seat.folder / "board", self._file(seat.rank)
        self._board = board = Board(path, shape)
        files = [seat.folder / f"{rank}.lock" for rank in range(seat.num_ranks)]
        self.locks = {rank: Lock(file) for rank, file in enumerate(files)}
        try:
            board.set_number(
                shape.fingerprint(seat.rank), int.from_bytes(alike.digest(), "big") + 1
            )
            hello = {
                "boot": _BOOT.read_text().strip(),
                "process": asdict(this_process(f"rank {seat.rank}")),
                "memory": self.backend.export(shared),
            }
            written = mine.with_suffix(".new")
            # A peer that has refused has removed the folder; the board, still mapped, says why.
            with contextlib.suppress(FileNotFoundError):
                written.write_text(json.dumps(hello))
                written.rename(mine)
            found = self._greet(board)
            self.backend.map_words(board)
            self._watch(found, hello)
            for peer, other in found.items():
                self.backend.open(peer, other["memory"])
            board.set_number(shape.verdict(seat.rank), _REACHED)
            self._agree(board)
        finally:
            for file in (mine, path, *files):
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                seat.folder.rmdir()

    def _greet(self, board: Board) -> dict[int, dict[str, Any]]:
        """What every other rank says of itself."""
        seat, shape = self.seat, board.shape
        own = board.number(shape.fingerprint(seat.rank))
        found: dict[int, dict[str, Any]] = {}

        def all_here() -> bool:
            for peer in seat.peers:
                if board.number(shape.fingerprint(peer)) not in (0, own):
                    raise PeerMismatch(
                        asked=f"move pages together with rank {peer}",
                        found="its pools, its number of ranks or its limits are others",
                        remedy="give all ranks of a group the same pools and settings",
                    )
                with contextlib.suppress(FileNotFoundError):
                    if peer not in found:
                        found[peer] = json.loads(self._file(peer).read_text())
            return len(found) == len(seat.peers) or self._refused(board)

        wait_until(all_here, self.limits.connect_seconds)
        if len(found) < len(seat.peers):
            raise self._unreachable(f"ranks {sorted(set(seat.peers) - set(found))} didn't come")
        return found

    def _refused(self, board: Board) -> bool:
        verdicts = [board.number(board.shape.verdict(peer)) for peer in self.seat.peers]
        return _UNREACHED in verdicts or bool(self.dead)

    def _watch(self, found: Mapping[int, dict[str, Any]], hello: dict[str, Any]) -> None:
        self._watcher = ProcessWatcher(self._ended, tick=self._tick)
        for peer, other in found.items():
            identity = ProcessIdentity(**other["process"])
            same = identity.pid_namespace == hello["process"]["pid_namespace"]
            if other["boot"] != hello["boot"] or not same:
                raise self._unreachable(f"rank {peer} is on another node or in another container")
            if not self._watcher.watch(peer, identity):
                raise self._unreachable(f"rank {peer} has ended")

    def _agree(self, board: Board) -> None:
        """All or none: a rank that can't reach another ends it for everybody."""

        def all_said() -> bool:
            words = [board.number(board.shape.verdict(peer)) for peer in self.seat.peers]
            return all(words) or self._refused(board)

        if not wait_until(all_said, self.limits.connect_seconds) or self._refused(board):
            raise self._unreachable("not every rank of the group reaches every other")

    def _file(self, rank: int) -> Path:
        return self.seat.folder / f"{rank}.json"

    def _unreachable(self, found: str) -> PeerUnreachable:
        return PeerUnreachable(
            asked=f"move pages together with {self.seat.num_ranks - 1} other ranks",
            found=found,
            remedy="nothing: each rank loads all of its pages itself",
        )

    def _ended(self, rank: int) -> None:
        self.dead.add(rank)
        self._release(rank, self.seat.rank)
        self.leave(f"rank {rank} has ended")

    def _tick(self) -> None:
        # Again and again: a dying process's GPU may write a word after the host did.
        for rank in list(self.dead):
            self._release(rank, self.seat.rank)

    def _release(self, writer: int, reader: int) -> None:
        """Write a rank's words to a reader in its stead, so that no stream waits for ever."""
        for offset in self.board.shape.waited_for(writer, reader):
            self.board.set_word(offset, RELEASED)
