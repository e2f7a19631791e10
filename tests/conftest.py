"""What every test stands on: a quiet, single-threaded, repeatable process without Ray.

`HYPOTHESIS_PROFILE=explore` searches with fresh seeds and more examples than the default.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from rayhicache.actors.cluster import Cluster

# Before torch and ray are imported, by this process and by all that it starts.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("RAY_ADDRESS", None)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without Ray first: they are quick, and a cluster that is up would slow them."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
    for item in items:
        if item.get_closest_marker("ray") is not None:
            # Ray leaves sockets to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            kind = "pytest.PytestUnraisableExceptionWarning"
            item.add_marker(pytest.mark.filterwarnings(f"ignore:.*socket.*:{kind}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Only tests marked `ray`, and fixtures that they ask for, may start or join a cluster."""
    if item.get_closest_marker("ray") is not None or importlib.util.find_spec("ray") is None:
        return (yield)
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", _refuse_ray)
        return (yield)


def _refuse_ray(*_: Any, **__: Any) -> NoReturn:
    pytest.fail("ray.init in a test that is not marked: add `@pytest.mark.ray`")


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """The cluster of two nodes that all tests with Ray share."""
    import clusters

    with clusters.shared_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster; whatever a test does to it, soon all is well and nothing is held."""
    import clusters

    yield running_cluster
    assert clusters.eventually(lambda: clusters.is_well(running_cluster)), running_cluster.status()
