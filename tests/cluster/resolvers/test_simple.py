"""SimpleClusterResolver: first the tests that TensorFlow has, by their names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.resolvers.samples import PS, WORKERS, is_cluster
from zmqdist.cluster import ClusterSpec
from zmqdist.resolvers import SimpleClusterResolver
from zmqdist.testing import check_resolver

JOBS: dict[str, Any] = {"ps": PS, "worker": WORKERS}


def simple(**argument: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(JOBS), **argument)


def test_init_simple_cluster_resolver() -> None:
    resolver = simple(
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
        master="m:1",
    )
    assert is_cluster(resolver.cluster_spec(), JOBS)
    matches = (
        resolver.task_type,
        resolver.task_id,
        resolver.environment,
        resolver.rpc_layer,
        resolver.num_accelerators(),
    )
    assert matches == ("ps", 1, "cloud", "grpc", {"GPU": 8})
    assert resolver.master() == "grpc://m:1"


def test_override_simple_cluster_resolver() -> None:
    resolver = simple(
        task_type="ps", task_id=1, environment="", num_accelerators={"GPU": 8}, rpc_layer="grpc"
    )
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "http"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "http")
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {"GPU": 8}


def test_simple_override_master_with_rpc_layer() -> None:
    assert simple().master("worker", 1, "grpc") == "grpc://worker1:2222"


def test_simple_override_master_with_task_index_zero() -> None:
    assert simple().master("worker", 0, "grpc") == "grpc://worker0:2222"


def test_simple_override_master() -> None:
    assert simple().master("worker", 2) == "worker2:2222"


# -- the rest of the contract ----------------------------------------------------------------------


@pytest.mark.parametrize("spec", [{"worker": ["a:1"]}, None, "a:1"], ids=repr)
def test_cluster_spec_must_be_a_spec(spec: Any) -> None:
    with pytest.raises(TypeError, match="cluster_spec must be a ClusterSpec"):
        SimpleClusterResolver(spec)


def test_master_must_be_text() -> None:
    with pytest.raises(TypeError, match="master is 3, wants a str"):
        simple(master=3)


def test_accelerators_are_the_argument() -> None:
    assert simple().num_accelerators("ps", 0) == {}
    resolver = simple(num_accelerators={"GPU": 2})
    resolver.num_accelerators()["GPU"] = 7
    assert resolver.num_accelerators("worker", 9, {"device_count": {"TPU": 1}}) == {"GPU": 2}


def test_own_task_does_not_choose_master() -> None:
    resolver = simple(master="m:1", task_type="worker", task_id=1)
    assert [resolver.master(), resolver.master("worker"), resolver.master(task_id=1)] == ["m:1"] * 3


def test_rpc_layer_argument_wins() -> None:
    resolver = simple(rpc_layer="zmq")
    assert resolver.master("ps", 0, "grpc") == "grpc://ps0:2222"
    assert resolver.master("ps", 0, "") == resolver.master("ps", 0) == "zmq://ps0:2222"


def test_unknown_task_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="job 'worker' has no task with index 3"):
        simple().master("worker", 3)


def test_empty_master_stays_empty() -> None:
    """TensorFlow gives "grpc://"."""
    assert simple(rpc_layer="grpc").master() == simple().master(rpc_layer="grpc") == ""


def test_resolver_conforms() -> None:
    check_resolver(simple(rpc_layer="zmq"))
    check_resolver(SimpleClusterResolver(ClusterSpec({})))
    check_resolver(
        SimpleClusterResolver(ClusterSpec({"worker": {3: "a:1", 9: "[::1]:2"}, "ps": []}))
    )
