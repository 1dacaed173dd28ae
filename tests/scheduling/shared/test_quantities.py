"""Amounts of resources, checked where a program and a config give them."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from zmqdist.errors import InvalidArgumentError
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.scheduling.shared.quantities import amounts_text, quantities


def test_amounts_become_sorted_thousandths_without_zeros() -> None:
    checked = quantities({"memory_gb": 0.5, "gpu": 2, "licence": 0})
    assert checked == (("gpu", 2000), ("memory_gb", 500))
    assert amounts_text(checked) == "gpu 2, memory_gb 0.5"


@pytest.mark.parametrize(
    ("amounts", "error", "text"),
    [
        (["gpu"], TypeError, "resources is ['gpu'], wants a mapping"),
        ({1: 1}, TypeError, "resources has the name 1, wants a text"),
        ({"gpu": "1"}, TypeError, "resources: gpu is '1', wants a number"),
        ({"gpu": True}, TypeError, "resources: gpu is True, wants a number"),
        ({"gpu": 1.5}, ValueError, "resources: gpu is 1.5, wants whole devices, or a part of one"),
        ({"x": -1}, ValueError, "resources: x is -1, wants 0.001 to 1000000000"),
        ({"x": 1e-9}, ValueError, "resources: x is 0, wants 0.001"),
        ({"x": nan}, ValueError, "resources: x is -0.001, wants 0.001"),
        ({"x": inf}, ValueError, "resources: x is -0.001, wants 0.001"),
        ({"a b": 1}, ValueError, "resources has the name 'a b', wants at most 64 of"),
        (dict.fromkeys(map("x{}".format, range(33)), 1), ValueError, "resources has 33 names"),
    ],
)
def test_amount_that_no_resource_has_is_refused(
    amounts: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        quantities(amounts)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ({"gpu": 0.5}, 'resources: gpu is 0.5, wants whole devices, or "auto"'),
        ({"x": "auto"}, "resources: x is 'auto', wants a number"),
        ({"gpu": "all"}, "resources: gpu is 'all', wants a number"),
    ],
)
def test_config_of_worker_refuses_amount(resources: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        WorkerConfig("localhost:1", resources=resources, processes=True)
    assert str(caught.value).startswith(text)


def test_gpu_needs_slots_that_are_processes() -> None:
    with pytest.raises(InvalidArgumentError, match="gpu needs slots that are processes"):
        WorkerConfig("localhost:1", resources={"gpu": 1})
    assert WorkerConfig("localhost:1", resources={"licence": 1}).resources == {"licence": 1}
