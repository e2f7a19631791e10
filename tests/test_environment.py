"""The promises of conftest.py."""

from __future__ import annotations

import pytest
import ray
import torch


def test_an_unmarked_test_may_not_start_ray() -> None:
    with pytest.raises(pytest.fail.Exception, match="not marked"):
        ray.init(address="local")


def test_an_unmarked_test_may_not_start_ray_by_a_call_that_connects_by_itself() -> None:
    with pytest.raises(pytest.fail.Exception, match="not marked"):
        ray.put(1)


@pytest.mark.ray
def test_a_marked_test_has_the_real_ray() -> None:
    assert ray.init.__module__.startswith("ray.")


def test_torch_computes_on_one_thread_so_results_repeat_bit_for_bit() -> None:
    assert torch.get_num_threads() == 1
