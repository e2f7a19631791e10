"""Ray on this machine: joined, or started with several nodes for a cluster of one's own."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster as RayCluster

from rayhicache.actors.devices import local_gpus
from rayhicache.actors.naming import NAMESPACE, SEAT_LABEL
from rayhicache.config import ClusterConfig
from rayhicache.device.gpus import VISIBLE
from rayhicache.errors import LaunchFailed, RayNotFound
from rayhicache.memory.process import start_time_of

# A node that died is known after about a second instead of fourteen.
HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 700,
    "health_check_failure_threshold": 3,
}
BOOK_MEMORY = 1 << 30
CPUS = 4
LISTEN_SECONDS = 3.0
FOLDER = "rhc-"


def join(address: str, *, remedy: str = "") -> None:
    """Join the Ray at an address, unless this process has joined one already.

    Args:
        remedy: for the error, when no Ray answers.

    Raises:
        RayNotFound: none answers there.
    """
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if not _is_same(address, joined):
            raise RayNotFound(
                asked=f"join the Ray at {address!r}",
                found=f"this process has joined the one at {joined}",
                remedy="use that one, call `ray.shutdown()` first, or use another process",
            )
        return
    try:
        _check_listens(_last_started() if address == "auto" else address)
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (OSError, OverflowError, ValueError, RuntimeError, SystemExit) as fault:
        # Where something else than Ray answers, Ray ends the process after two minutes.
        raise RayNotFound(
            asked=f"join the Ray at {address!r}",
            found=(str(fault).splitlines() or ["nothing"])[0],
            remedy=remedy
            or "start it (`ray start --head`), name its address, or leave the address out to "
            "start a local one",
        ) from fault


def _last_started() -> str:
    """What "auto" means to Ray, "" if it has to search: a start that was killed leaves its file."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(folder, "ray", "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _check_listens(address: str) -> None:
    """Refuse at once what Ray itself would try for two minutes: nobody at the address.

    Raises:
        OSError, OverflowError: nobody listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # nothing to try, "local", and what Ray itself refuses
    socket.create_connection((host.strip("[]"), int(port)), timeout=LISTEN_SECONDS).close()


def _is_same(address: str, joined: str) -> bool:
    """Whether an address means the Ray that this process has joined."""
    if address in ("auto", joined):
        return True
    (host, _, port), (mine, _, my_port) = address.rpartition(":"), joined.rpartition(":")
    if port != my_port:
        return False
    try:
        found = socket.gethostbyname(host)
    except OSError:
        return False
    return found == socket.gethostbyname(mine) or found.startswith("127.")


def _free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def sweep_folders() -> list[Path]:
    """Remove the folders of local Rays whose process is gone; which ones."""
    removed = []
    for folder in Path("/tmp").glob(f"{FOLDER}*-*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        mine = folder.stat().st_uid == os.getuid()
        if mine and pid.isdecimal() and start_time_of(int(pid)) is None:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


class LocalRay:
    """Several Ray nodes on this machine; they end with `stop` or with this process.

    Nodes are labelled with their seats, so an arena is found again by the same node.

    Raises:
        LaunchFailed: a node doesn't come up; none is left then.
    """

    def __init__(self, config: ClusterConfig) -> None:
        sweep_folders()
        # Socket paths are limited to 107 bytes.
        self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir="/tmp")
        self._cluster: Any = RayCluster()
        # Ray's advice about `ray start` and its addresses isn't for those who call `launch`.
        logger = logging.getLogger("ray")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            self._start(config)
        except (OSError, RuntimeError, TimeoutError) as fault:
            self.stop()
            raise LaunchFailed(
                asked=f"start {config.local_nodes} Ray nodes on this machine",
                found=str(fault),
                remedy="see how much memory this machine has left, or start fewer nodes",
            ) from fault
        except BaseException:
            self.stop()
            raise
        finally:
            logger.setLevel(level)

    def _start(self, config: ClusterConfig) -> None:
        # Ray notes the newest cluster's address there, and fails where it never ran before.
        system = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        Path(system, "ray").mkdir(mode=0o777, parents=True, exist_ok=True)
        common: dict[str, Any] = {
            "num_cpus": CPUS,
            "memory": config.arena_bytes + BOOK_MEMORY,
            "object_store_memory": config.object_store_bytes,
            "include_dashboard": False,
        }
        gpus: list[tuple[str, ...]] = [()] * config.local_nodes
        if config.device != "cpu":
            gpus = local_gpus(config.local_nodes)
        for number, mine in enumerate(gpus):
            options = {
                **common,
                "labels": {SEAT_LABEL: f"node{number}"},
                "num_gpus": len(mine),
            }
            if mine:
                options["env_vars"] = {VISIBLE: ",".join(mine)}
            if number == 0:
                options |= {
                    "temp_dir": self._folder,
                    "_system_config": HEALTH,
                    "include_dashboard": config.dashboard,
                    # The usual one may be another Ray's; then jobs couldn't be submitted.
                    "dashboard_agent_listen_port": _free_port(),
                }
            self._cluster.add_node(**options)
        self._cluster.wait_for_nodes()
        # Where a submitted job looks for its own Ray; else it takes the one started last.
        Path(self._folder, "ray_current_cluster").write_text(self.address, encoding="utf-8")

    @property
    def address(self) -> str:
        """What `join` and `connect` take."""
        address: str = self._cluster.address
        return address

    @property
    def dashboard(self) -> str | None:
        """Where Ray's dashboard is, which also takes submitted jobs; None if there is none."""
        found: str | None = self._cluster.webui_url
        return f"http://{found}" if found else None

    def stop(self) -> None:
        """Leave Ray and end its processes. Idempotent."""
        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
