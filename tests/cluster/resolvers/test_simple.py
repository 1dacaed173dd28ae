"""SimpleClusterResolver: first the tests that TensorFlow has, by their names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.resolvers.samples import PS, WORKERS, is_cluster
from zmqdist.cluster import ClusterSpec
from zmqdist.resolvers import SimpleClusterResolver
from zmqdist.testing import check_resolver

JOBS: dict[str, Any] = {"ps": PS, "worker": WORKERS}


def simple(**given: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(JOBS), **given)


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
    found = (
        resolver.task_type,
        resolver.task_id,
        resolver.environment,
        resolver.rpc_layer,
        resolver.num_accelerators(),
    )
    assert found == ("ps", 1, "cloud", "grpc", {"GPU": 8})
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
def test_what_is_no_cluster_spec_is_a_type_error(spec: Any) -> None:
    with pytest.raises(TypeError, match="cluster_spec must be a ClusterSpec"):
        SimpleClusterResolver(spec)


def test_a_master_that_is_no_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="master is 3, wants a str"):
        simple(master=3)


def test_accelerators_are_those_that_were_given_whatever_is_asked() -> None:
    assert simple().num_accelerators("ps", 0) == {}
    resolver = simple(num_accelerators={"GPU": 2})
    resolver.num_accelerators()["GPU"] = 7
    assert resolver.num_accelerators("worker", 9, {"device_count": {"TPU": 1}}) == {"GPU": 2}


def test_the_own_task_does_not_choose_the_master() -> None:
    resolver = simple(master="m:1", task_type="worker", task_id=1)
    assert [resolver.master(), resolver.master("worker"), resolver.master(task_id=1)] == ["m:1"] * 3


def test_an_rpc_layer_that_is_given_wins_and_an_empty_one_counts_as_none() -> None:
    resolver = simple(rpc_layer="zmq")
    assert resolver.master("ps", 0, "grpc") == "grpc://ps0:2222"
    assert resolver.master("ps", 0, "") == resolver.master("ps", 0) == "zmq://ps0:2222"


def test_an_unknown_task_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="job 'worker' has no task with index 3"):
        simple().master("worker", 3)


def test_an_empty_master_stays_empty() -> None:
    """TensorFlow gives "grpc://"."""
    assert simple(rpc_layer="grpc").master() == simple().master(rpc_layer="grpc") == ""


def test_it_does_what_every_resolver_must_do() -> None:
    check_resolver(simple(rpc_layer="zmq"))
    check_resolver(SimpleClusterResolver(ClusterSpec({})))
    check_resolver(
        SimpleClusterResolver(ClusterSpec({"worker": {3: "a:1", 9: "[::1]:2"}, "ps": []}))
    )
