"""What a cluster is made of: every number has a default, a unit and a check."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from rayhicache.errors import InvalidConfig, UnknownModel

MIB = 1 << 20
MODELS = ("glm-dsa-tiny", "glm-dsa-small", "llama-tiny", "llama-3b")
"""Models that are made on the spot, with random weights; see `rayhicache.engines.models`."""

DTYPES = ("float32", "bfloat16")
"""Dtypes of weights and of cached state."""

DEVICES = ("auto", "cpu", "cuda")
"""Where workers keep their pools; `auto` is cuda where Ray has a GPU for the worker."""

TOKENIZER_VOCAB = 129_280
"""Entries of the packaged tokenizer; a smaller vocabulary works on token ids alone."""

SEED_MAX = 2**63 - 1

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine: its model, and how much of the device it takes.

    Attributes:
        model: one of `MODELS`.
        seed: of the random weights; equal seeds are equal weights on every machine.
        num_blocks: device blocks, of one page each.
        dtype: one of `DTYPES`. Cold and restored runs are compared bit by bit in float32.
        max_positions: the longest prompt with its answer, in tokens.
        vocab_size: of the model.

    Raises:
        UnknownModel: with the list of known ones.
        InvalidConfig: a number out of its range, or an unknown dtype.
    """

    model: str = "glm-dsa-tiny"
    seed: int = 0
    num_blocks: int = 128
    dtype: str = "float32"
    max_positions: int = 8192
    vocab_size: int = TOKENIZER_VOCAB

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UnknownModel(
                asked=f"make an engine for model {self.model!r}",
                found="this build doesn't know it",
                remedy=f"name one of {', '.join(MODELS)}",
            )
        if self.dtype not in DTYPES:
            raise InvalidConfig(
                asked=f"make an engine of dtype {self.dtype!r}",
                found="it isn't supported",
                remedy=f"name one of {', '.join(DTYPES)}",
            )
        for name, value, low, high in (
            ("seed", self.seed, 0, SEED_MAX),
            ("num_blocks", self.num_blocks, 1, 2**31 - 1),
            ("max_positions", self.max_positions, 2, 2**31 - 1),
            ("vocab_size", self.vocab_size, 2, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise InvalidConfig(
                    asked=f"make an engine with {name} = {value}",
                    found="it is out of range",
                    remedy=f"choose {name} from {low} to {high}",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits and time-outs of a cluster, in seconds unless their name says otherwise.

    Attributes:
        ready_seconds: for an actor to come up.
        call_seconds: for one call to a pool, a directory or a peer.
        pull_seconds: for pulling one prefix from another node.
        lease_seconds: after which a reader of another node loses its lease.
        part_seconds: for one prompt of a job, on one worker.
        wait_seconds: for a layer to be enqueued while a reader waits.
        copy_seconds: for one load or store; later ones stay sealed until they have passed.
        queue_max: prompts that may be queued or running in the cluster.
        tries_max: workers that a prompt is tried on before its job fails.
        chunk_bytes: about the size of one chunk between nodes.
        chunks_in_flight: chunks of one pull asked for and not yet there.
    """

    ready_seconds: float = 120.0
    call_seconds: float = 5.0
    pull_seconds: float = 30.0
    lease_seconds: float = 60.0
    part_seconds: float = 600.0
    wait_seconds: float = 30.0
    copy_seconds: float = 60.0
    queue_max: int = 1024
    tries_max: int = 3
    chunk_bytes: int = 4 * MIB
    chunks_in_flight: int = 3

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise _invalid(f"limits.{one.name} = {value!r}", "choose a number above 0")
        if self.lease_seconds < self.pull_seconds:
            raise _invalid(
                f"limits.lease_seconds = {self.lease_seconds} under "
                f"limits.pull_seconds = {self.pull_seconds}",
                "a lease must outlast the pull that reads under it",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """One tier with its workers.

    Attributes:
        name: of the cluster; at most one runs under a name on one Ray.
        address: of the Ray to join, "auto" for this machine's; None starts a local one.
        local_nodes: Ray nodes that a local start gives.
        arena_bytes: host memory that each node's pool owns.
        page_tokens: tokens a page.
        engine: what the workers run.
        workers_per_node: workers on each node; 0 for engines of your own, which attach to the
            pools.
        device: one of `DEVICES`, for every worker. `auto` takes a GPU on nodes that have enough
            of them in Ray's books, and the host elsewhere; `cuda` is refused where one is missing.
        gpus_per_worker: the part of one GPU that Ray reserves for a worker on cuda, 0.01 to 1:
            with 0.5 two workers share a GPU. Ray counts it and doesn't limit the memory.
        copy_table: absolute path, on every node, of a file of `rayhicache bench` that says which
            way of copying serves which fragment size; empty takes the one known for the GPU.
        arena_root: folder of the arenas on every node, empty for `/dev/shm/rayhicache-<uid>`.
        object_store_bytes: of each local node; the tier's bytes are not in it.
        dashboard: whether a local start has Ray's dashboard, which also takes submitted jobs.
        limits: and time-outs.

    Raises:
        InvalidConfig: says which value, and what would be right.
    """

    name: str = "default"
    address: str | None = None
    local_nodes: int = 1
    arena_bytes: int = 256 * MIB
    page_tokens: int = 64
    engine: EngineSpec = field(default_factory=EngineSpec)
    workers_per_node: int = 1
    device: str = "auto"
    gpus_per_worker: float = 1.0
    copy_table: str = ""
    arena_root: str = ""
    object_store_bytes: int = 128 * MIB
    dashboard: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise _invalid(f"name = {self.name!r}", "use 1 to 63 letters, digits, '_', '.' and '-'")
        for name, low, high in (
            ("local_nodes", 1, 64),
            ("arena_bytes", MIB, 1 << 46),
            ("page_tokens", 1, 1 << 16),
            ("workers_per_node", 0, 64),
            ("object_store_bytes", 80 * MIB, 1 << 40),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise _invalid(f"{name} = {value!r}", f"choose an integer in [{low:,}, {high:,}]")
        if self.device not in DEVICES:
            raise _invalid(f"device = {self.device!r}", f"name one of {', '.join(DEVICES)}")
        part = self.gpus_per_worker
        if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0.01 <= part <= 1:
            raise _invalid(
                f"gpus_per_worker = {part!r}",
                "choose a part of one GPU, 0.01 to 1; a worker uses one GPU at most",
            )


def _invalid(found: str, remedy: str) -> InvalidConfig:
    return InvalidConfig(asked="make a cluster's configuration", found=found, remedy=remedy)
