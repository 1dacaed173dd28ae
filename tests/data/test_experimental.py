"""The names of tf.data.experimental."""

from __future__ import annotations

from typing import Any

import pytest

import zmqdist as zd
from zmqdist.data import experimental


def test_experimental_names_are_those_of_data() -> None:
    assert experimental.SHARD_HINT == -1
    assert experimental.AUTOTUNE == zd.data.AUTOTUNE == -1
    assert experimental.INFINITE_CARDINALITY == -1
    assert experimental.UNKNOWN_CARDINALITY == -2
    service: Any = experimental.service
    for name in service.__all__:
        assert getattr(service, name) is getattr(zd.data.service, name)
    assert set(service.__all__) <= set(dir(service))


def test_experimental_lacks_wrong_name() -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        experimental.nothing_such  # noqa: B018
