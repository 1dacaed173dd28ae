"""The check of resolvers finds what breaks a rule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.resolvers.samples import PS, WORKERS
from zmqdist.cluster import ClusterSpec
from zmqdist.resolvers import SimpleClusterResolver
from zmqdist.testing import check_resolver


class Right(SimpleClusterResolver):
    def __init__(self) -> None:
        super().__init__(
            ClusterSpec({"ps": PS, "worker": WORKERS}), task_type="ps", task_id=1, rpc_layer="zmq"
        )


class NoSpec(Right):
    def cluster_spec(self) -> Any:
        return {"ps": PS}


class Changing(Right):
    calls = 0

    def cluster_spec(self) -> ClusterSpec:
        self.calls += 1
        return ClusterSpec({"ps": [f"ps{self.calls}:1"]})


class OtherMaster(Right):
    def master(self, *task: Any, **_: Any) -> str:
        return "zmq://ps0:2222"


class DeafMaster(Right):
    def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
        return super().master(task_type, task_id)


class AnyMaster(Right):
    def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
        try:
            return super().master(task_type, task_id, rpc_layer)
        except ValueError:
            return ""


class NoEnvironment(Right):
    environment = None  # type: ignore[assignment]


class TextIndex(Right):
    task_id = "1"  # type: ignore[assignment]


class FalsyIndex(Right):
    @property
    def task_id(self) -> int | None:
        return self._task_id or 1

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id


class CountsCpus(Right):
    def num_accelerators(self, *_: Any) -> dict[str, int]:
        return {"CPU": 1}


class NoSentences(Right):
    def validate(self) -> Any:
        return None


def test_right_resolver_passes_unchanged() -> None:
    resolver = Right()
    check_resolver(resolver)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 1, "zmq")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (NoSpec, "cluster_spec() is a ClusterSpec"),
        (Changing, "cluster_spec() returns the same cluster"),
        (OtherMaster, "master('ps', 0, rpc_layer='other')"),
        (DeafMaster, "rpc_layer wins in master('ps', 0"),
        (AnyMaster, "master('ps', 2) is a ValueError"),
        (NoEnvironment, "environment is a text, not None"),
        (TextIndex, "task_id is a whole number or None, not '1'"),
        (
            FalsyIndex,
            "task_type, task_id and rpc_layer can be set, also to 0; not ('set', 1, 'layer')",
        ),
        (CountsCpus, "num_accelerators() is {type: count} without CPUs"),
        (NoSentences, "validate() is a list of sentences, not None"),
        (object, "it is a zmqdist.resolvers.ClusterResolver"),
    ],
)
def test_broken_rule_is_named(wrong: type[Any], expected: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_resolver(wrong())
    assert expected in str(caught.value)
