"""Workers on GPUs: what is reserved with Ray, and what is refused before anything is started."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import clusters
import rayhicache as hc
from clusters import CONFIG
from rayhicache.actors import cluster as face
from rayhicache.actors import devices
from rayhicache.actors.devices import check_local_gpus, local_gpus, worker_gpus
from rayhicache.actors.roster import named_actors
from rayhicache.device.gpus import visible_gpus
from rayhicache.errors import DeviceNotFound, InvalidConfig


def parts(gpus: float, **values: Any) -> float:
    """What each worker of a node with that many GPUs reserves."""
    config = replace(hc.ClusterConfig(), **values)
    return worker_gpus(config, {"node0": {"CPU": 4, "GPU": gpus}})["node0"]


@pytest.mark.parametrize(
    ("gpus", "workers", "part", "reserved"),
    [
        (1, 1, 1.0, 1.0),
        (8, 8, 1.0, 1.0),
        (8, 3, 1, 1.0),
        (1, 2, 0.5, 0.5),
        (1, 3, 1 / 3, 1 / 3),
        (2, 4, 0.5, 0.5),
        (0, 1, 1.0, 0.0),
        (1, 2, 1.0, 0.0),
        (2, 3, 0.6, 0.0),
        (0.5, 1, 0.5, 0.0),
    ],
)
def test_auto_takes_gpus_where_a_node_has_enough_and_the_host_elsewhere(
    gpus: float, workers: int, part: float, reserved: float
) -> None:
    values = {"workers_per_node": workers, "gpus_per_worker": part}
    assert parts(gpus, **values) == reserved
    assert parts(gpus, device="cpu", **values) == 0.0
    if reserved:
        assert parts(gpus, device="cuda", **values) == reserved
        return
    with pytest.raises(DeviceNotFound, match=f"{workers} workers") as error:
        parts(gpus, device="cuda", **values)
    assert f"has {int(gpus)} GPUs" in error.value.found


def test_a_node_whose_books_know_no_gpu_has_none() -> None:
    assert worker_gpus(hc.ClusterConfig(), {"node0": {}}) == {"node0": 0.0}


@pytest.mark.parametrize(
    ("gpus", "nodes", "divided"),
    [
        ("", 2, [(), ()]),
        ("0", 1, [("0",)]),
        ("0", 2, [("0",), ("0",)]),
        ("012", 2, [("0", "2"), ("1",)]),
        ("01", 3, [("0",), ("1",), ("0",)]),
    ],
)
def test_local_nodes_divide_the_gpus_or_share_them(
    gpus: str, nodes: int, divided: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: tuple(gpus))
    assert local_gpus(nodes) == divided


def test_cuda_is_refused_before_a_local_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", tuple)
    monkeypatch.setattr(face, "LocalRay", lambda config: pytest.fail("Ray was started"))
    with pytest.raises(DeviceNotFound, match="has 0 GPUs"):
        hc.launch(hc.ClusterConfig(name="no-gpu", device="cuda"))
    check_local_gpus(hc.ClusterConfig(device="auto"))


@pytest.mark.parametrize(
    "values",
    [
        {"device": "rocm"},
        {"gpus_per_worker": 0},
        {"gpus_per_worker": 2},
        {"gpus_per_worker": True},
        {"gpus_per_worker": float("nan")},
    ],
)
def test_a_device_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(values))):
        replace(hc.ClusterConfig(), **values)


@pytest.mark.ray
def test_cuda_on_a_ray_without_gpus_is_refused_and_starts_nothing(cluster: hc.Cluster) -> None:
    config = replace(CONFIG, name="gpu", address=cluster.address, device="cuda")
    with pytest.raises(DeviceNotFound, match="Ray's books"):
        hc.launch(config)
    assert "gpu" not in face.running_clusters()
    assert not named_actors("gpu")
    assert clusters.is_well(cluster)
    assert {worker.device for worker in cluster.status().workers} == {"cpu"}


PROGRAM = """
import json, sys
import ray
import rayhicache as hc
from rayhicache.actors import devices
from rayhicache.errors import DeviceNotFound

devices.visible_gpus = lambda: ("0",)
engine = hc.EngineSpec(vocab_size=512, num_blocks=16, max_positions=256)
shared = {"arena_bytes": 8 << 20, "engine": engine, "gpus_per_worker": 0.5}
with hc.launch(hc.ClusterConfig(name="auto", **shared)) as cluster:
    told = {"devices": [worker.device for worker in cluster.status().workers]}
    told["left"] = ray.available_resources().get("GPU", 0)
    try:
        hc.launch(
            hc.ClusterConfig(name="cuda", address=cluster.address, device="cuda", **shared)
        )
    except DeviceNotFound as fault:
        told["refused"] = str(fault)
print(json.dumps(told))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(bool(visible_gpus()), reason="there is a GPU, and this pretends to have one")
def test_a_gpu_in_rays_books_alone_is_passed_over_by_auto_and_refused_by_cuda() -> None:
    """Ray reserves the halves; the workers find that there is nothing behind them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["devices"] == ["cpu"]
    assert told["left"] == 0.5
    assert "use GPU 0" in told["refused"]
