"""`launch` and `connect`: a cluster as the programs see it that own or use it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError

from rayhicache.actors.calls import ActorFault, ActorGone, ask
from rayhicache.actors.controller import Controller
from rayhicache.actors.devices import check_local_gpus, worker_gpus
from rayhicache.actors.job import GenerateJob, Job
from rayhicache.actors.local_ray import LocalRay, join
from rayhicache.actors.messages import Submission
from rayhicache.actors.naming import NAMESPACE, controller_name
from rayhicache.actors.remote import CONTROLLER_GROUPS, Placement, create
from rayhicache.actors.roster import books_of, end_actors, seats_of_nodes
from rayhicache.actors.status import ClusterStatus
from rayhicache.config import ClusterConfig
from rayhicache.errors import (
    ClusterClosed,
    ClusterExists,
    ClusterNotFound,
    LaunchFailed,
    RayHiCacheError,
)
from rayhicache.memory.folder import default_root
from rayhicache.memory.janitor import list_arenas, remove_tier, sweep
from rayhicache.memory.sizes import check_room, ray_monitor_threshold, read_host_memory
from rayhicache.wire.codec import decode, encode

log = logging.getLogger(__name__)

CONNECT_REMEDY = (
    "name the address that `rayhicache up` or `Cluster.address` told; if no cluster is up yet, "
    "`rayhicache up` starts one with a Ray of its own, or on one that runs (`ray start --head`)"
)
LEFT_SECONDS = 5.0
LEFT_PAUSE_SECONDS = 0.05


class Cluster:
    """A running cluster. Any thread may call; several processes may hold the same one."""

    def __init__(self, config: ClusterConfig, controller: Any, local: LocalRay | None) -> None:
        self.config = config
        self._controller = controller
        self._local = local
        self._closed = False

    @property
    def address(self) -> str:
        """Address of the Ray that the cluster runs on, for `connect` in other processes."""
        if self._local is not None:
            return self._local.address
        address: str = ray.get_runtime_context().gcs_address
        return address

    @property
    def dashboard(self) -> str | None:
        """Where the dashboard is of the Ray that `launch` started here; None if there is none."""
        return None if self._local is None else self._local.dashboard

    def submit(self, job: GenerateJob) -> Job:
        """Queue a job. Returns once its prompts are routed.

        Raises:
            InvalidRequest, PromptTooLong: it can't be served; nothing was queued.
            QueueFull: too many prompts are waiting.
            ClusterClosed: the cluster was shut down.
        """
        texts = tuple(prompt for prompt in job.prompts if isinstance(prompt, str))
        tokens = tuple(tuple(p) for p in job.prompts if not isinstance(p, str))
        message = encode(Submission(texts=texts, tokens=tokens, max_new_tokens=job.max_new_tokens))
        limits = self.config.limits
        name = self._ask("submit", message, timeout=limits.ready_seconds)
        return Job(name, len(job.prompts), self._controller, limits.call_seconds)

    def status(self) -> ClusterStatus:
        """How the pools and workers are, now.

        Raises:
            ClusterClosed: the cluster was shut down.
        """
        limit = 2 * self.config.limits.call_seconds
        return decode(self._ask("status", group="control", timeout=limit), ClusterStatus)

    def settle(self, timeout: float = 30.0) -> bool:
        """Wait until what the workers stored so far is committed; False on time-out.

        Raises:
            ClusterClosed: the cluster was shut down.
        """
        limit = timeout + 2 * self.config.limits.call_seconds
        return bool(self._ask("settle", timeout, timeout=limit))

    def shutdown(self) -> None:
        """End every actor of the cluster, and the local Ray if `launch` started it. Idempotent.

        Jobs are cancelled. The arenas are removed; nothing of the cluster is left.
        """
        if self._closed:
            return
        self._closed = True
        _end(self._controller, self.config)
        if self._local is not None:
            self._local.stop()
        _remove_left(self.config)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _ask(self, method: str, *args: object, timeout: float, group: str = "") -> Any:
        what = f"{method} at cluster {self.config.name!r}"
        if self._closed:
            raise ClusterClosed(asked=what, found="it was shut down here", remedy="launch it anew")
        try:
            return ask(self._controller, method, *args, what=what, timeout=timeout, group=group)
        except ActorGone as fault:
            raise ClusterClosed(
                asked=what,
                found=f"its controller doesn't answer: {fault.found}",
                remedy="connect again; if that fails, launch the cluster anew",
            ) from fault


def launch(config: ClusterConfig | None = None) -> Cluster:
    """Bring a cluster up: on the Ray at `config.address`, or on a local one that is started.

    Arenas of tiers that are gone are swept first. A launch that fails leaves nothing behind.

    Raises:
        RayNotFound: no Ray at the address.
        ClusterExists: a cluster of that name runs there.
        DeviceNotFound: the device is cuda, and a node has too few GPUs; nothing was started.
        ArenaTooLarge, SeatTaken, ArenaError, LayoutMismatch, LaunchFailed: a part can't come up.
    """
    config = config or ClusterConfig()
    local, address = None, config.address
    if address is None:
        _check_alone(config)
        _check_host(config)
        check_local_gpus(config)
        local = LocalRay(config)
        address = local.address
    try:
        join(address)
        sweep(arena_root(config.arena_root), is_running=is_running)
        worker_gpus(config, books_of(seats_of_nodes()))
        controller = _claim(config)
        try:
            _start(controller, config)
        except BaseException:
            _end(controller, config)
            raise
    except BaseException:
        if local is not None:
            local.stop()
            _remove_left(config)
        raise
    return Cluster(config, controller, local)


def connect(name: str = "default", *, address: str = "auto") -> Cluster:
    """The running cluster of that name, from any process that can reach its Ray.

    Raises:
        RayNotFound: no Ray at the address.
        ClusterNotFound: no cluster of that name there.
    """
    join(address, remedy=CONNECT_REMEDY)
    what = f"connect to cluster {name!r}"
    try:
        controller = ray.get_actor(controller_name(name), namespace=NAMESPACE)
        config = decode(ask(controller, "config", what=what, timeout=30.0), ClusterConfig)
    except (ValueError, ActorGone) as fault:
        raise ClusterNotFound(
            asked=what,
            found=f"no such cluster runs on the Ray at {address!r}",
            remedy=f"launch it, or choose one of {running_clusters()}",
        ) from fault
    return Cluster(config, controller, None)


def running_clusters() -> list[str]:
    """Names of the clusters on the Ray that this process has joined."""
    suffix = controller_name("")
    named: Sequence[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"].removesuffix(suffix)
        for actor in named
        if actor["namespace"] == NAMESPACE and actor["name"].endswith(suffix)
    )


def is_running(name: str) -> bool:
    """Whether a cluster of that name runs on the Ray that this process has joined."""
    return name in running_clusters()


def arena_root(configured: str) -> Path:
    """Folder of the arenas."""
    return Path(configured) if configured else default_root()


def _claim(config: ClusterConfig) -> Any:
    """Create the controller: its name is the cluster's."""
    try:
        return create(
            Controller,
            controller_name(config.name),
            Placement(threads=8, groups=CONTROLLER_GROUPS),
            encode(config),
        )
    except ActorAlreadyExistsError as fault:
        raise _exists(config.name) from fault


def _exists(name: str) -> ClusterExists:
    return ClusterExists(
        asked=f"launch cluster {name!r}",
        found="one of that name runs on this Ray",
        remedy=f"connect to it, choose another name, or end it: rayhicache down {name}",
    )


def _check_alone(config: ClusterConfig) -> None:
    """A process joins one Ray: a local one is started only where none has been joined."""
    if not ray.is_initialized():
        return
    if is_running(config.name):
        raise _exists(config.name)
    raise LaunchFailed(
        asked=f"start a local Ray for cluster {config.name!r}",
        found="this process has joined one already",
        remedy='launch there with address="auto", or call `ray.shutdown()` first',
    )


def _check_host(config: ClusterConfig) -> None:
    """Refuse before a Ray is started what this machine can't hold, or holds already."""
    root = arena_root(config.arena_root)
    arenas = [info for info in list_arenas(root) if info.tier == config.name]
    if any(info.held for info in arenas):
        raise ClusterExists(
            asked=f"launch cluster {config.name!r} on a Ray of its own",
            found="a cluster of that name is up on this machine, on another Ray",
            remedy="choose another name, or join that Ray by its address",
        )
    there = sum(info.nbytes for info in arenas)
    new_bytes = config.local_nodes * config.arena_bytes - there
    if new_bytes > 0:
        # The folder itself may not be there yet; what it would lie on is.
        place = next(folder for folder in (root, *root.parents) if folder.exists())
        check_room(new_bytes, read_host_memory(place), monitor_threshold=ray_monitor_threshold())


def _start(controller: Any, config: ClusterConfig) -> None:
    what = f"launch cluster {config.name!r}"
    try:
        ask(controller, "start", what=what, timeout=3 * config.limits.ready_seconds)
    except (ActorGone, ActorFault) as fault:
        raise LaunchFailed(
            asked=what, found=fault.found, remedy="see the controller's log"
        ) from fault


def _end(controller: Any, config: ClusterConfig) -> None:
    """End the controller and all other actors, whether or not it is well."""
    limits = config.limits
    if not ray.is_initialized():
        log.warning("this process has left Ray; cluster %s is not ended", config.name)
        return
    what = f"shut down cluster {config.name!r}"
    limit = limits.copy_seconds + 4 * limits.call_seconds
    try:
        ask(controller, "shutdown", what=what, timeout=limit, group="control")
    except RayHiCacheError as fault:
        log.warning("ending the cluster without its controller: %s", fault)
        ray.kill(controller, no_restart=True)
        end_actors(config.name, limits.call_seconds)
    else:
        ray.kill(controller, no_restart=True)


def _remove_left(config: ClusterConfig) -> None:
    """Remove this machine's arenas of pools that could not do so themselves.

    A process that was just killed holds its arena for a moment more.
    """
    root, pause = arena_root(config.arena_root), threading.Event()
    deadline = time.monotonic() + LEFT_SECONDS
    remove_tier(root, config.name)
    while any(info.tier == config.name for info in list_arenas(root)):
        if time.monotonic() >= deadline:
            log.warning("an arena is still held; remove it with: rayhicache down %s", config.name)
            return
        pause.wait(LEFT_PAUSE_SECONDS)
        remove_tier(root, config.name)
