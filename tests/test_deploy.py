"""What the deployment files must say, since a node without it fails late and far away."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parent.parent
VERSION = "2.60.0"


def _load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("service", ["head", "worker", "gpu"])
def test_a_compose_node_has_what_an_arena_and_ray_need(service: str) -> None:
    node = _load("docker-compose.yml")["services"][service]
    assert node["init"] is True
    assert node["restart"] == "always"
    assert node["ulimits"]["memlock"] == -1
    assert node["environment"]["RAY_AUTH_MODE"] == "token"
    assert node["shm_size"] == ("16gb" if service == "gpu" else "4gb")
    assert "ray start" in node["command"]
    assert "--object-store-memory=" in node["command"]


def test_the_compose_node_with_gpus_has_them_and_an_image_for_them() -> None:
    node = _load("docker-compose.yml")["services"]["gpu"]
    assert node["profiles"] == ["gpu"]
    (device,) = node["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert node["build"]["args"]["BASE"] == f"rayproject/ray:{VERSION}-py311-gpu"
    assert node["build"]["args"]["TORCH_INDEX"] == ""
    assert node["image"] != _load("docker-compose.yml")["services"]["head"]["image"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(node["build"]["args"]["EXTRAS"].split(",")) <= set(extras["optional-dependencies"])


def test_every_pod_of_the_kubernetes_cluster_with_gpus_has_one() -> None:
    spec = _load("deploy/kuberay-gpu.yaml")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("name", ["kuberay", "kuberay-gpu"])
def test_a_kubernetes_node_has_shared_memory_and_a_token(name: str) -> None:
    spec = _load(f"deploy/{name}.yaml")["spec"]
    assert spec["rayVersion"] == VERSION
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
        assert "object-store-memory" in group["rayStartParams"]


def test_a_launched_node_has_shared_memory_and_a_token() -> None:
    config = _load("deploy/cluster-launcher.yaml")
    validate_config(prepare_config(config))
    options = config["docker"]["run_options"]
    expected = {"--init", "--shm-size=4g", "--ulimit memlock=-1", "--env RAY_AUTH_MODE=token"}
    assert expected <= set(options)


def test_the_image_has_the_ray_that_the_constraints_pin() -> None:
    assert f"rayproject/ray:{VERSION}-" in (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    assert f"ray=={VERSION}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
