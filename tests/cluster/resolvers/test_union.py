"""UnionResolver: first the tests that TensorFlow has, by their names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.resolvers.samples import PS, WORKERS, is_cluster
from zmqdist.cluster import ClusterSpec
from zmqdist.resolvers import SimpleClusterResolver, UnionResolver
from zmqdist.testing import check_resolver


def simple(jobs: dict[str, Any], **argument: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(jobs), **argument)


def union(*clusters: dict[str, Any], **argument: Any) -> UnionResolver:
    return UnionResolver(*map(simple, clusters), **argument)


def addresses(*indices: int) -> dict[int, str]:
    return {index: f"worker{index}:2222" for index in indices}


def test_single_cluster_resolver() -> None:
    jobs: dict[str, Any] = {"ps": PS, "worker": WORKERS}
    assert is_cluster(union(jobs).cluster_spec(), jobs)


def test_union_cluster_resolver_get_properties() -> None:
    first = simple(
        {"ps": PS},
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    second = simple(
        {"worker": WORKERS}, task_type="worker", task_id=2, environment="local", num_accelerators={"GPU": 16}, rpc_layer="http"
    )  # fmt: skip
    resolver = UnionResolver(first, second)

    def answers() -> tuple[Any, ...]:
        return (
            resolver.task_type,
            resolver.task_id,
            resolver.environment,
            resolver.num_accelerators(),
            resolver.rpc_layer,
        )

    assert answers() == ("ps", 1, "cloud", {"GPU": 8}, "grpc")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "http"
    assert answers() == ("worker", 2, "cloud", {"GPU": 8}, "http")
    assert (first.task_type, first.task_id, first.rpc_layer) == ("ps", 1, "grpc")


def test_two_non_overlapping_job_merged_cluster_resolver() -> None:
    assert is_cluster(
        union({"ps": PS}, {"worker": WORKERS}).cluster_spec(), {"ps": PS, "worker": WORKERS}
    )


def test_merged_cluster_resolver_master() -> None:
    resolver = union({"ps": PS}, {"worker": WORKERS})
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "worker1:2222"
    assert resolver.master("worker", 1, rpc_layer="grpc") == "grpc://worker1:2222"


def test_overlapping_job_merged_cluster_resolver() -> None:
    later, first = ["worker4:2222", "worker5:2222"], WORKERS
    assert is_cluster(
        union({"worker": later}, {"worker": first}).cluster_spec(), {"worker": [*later, *first]}
    )


def test_overlapping_sparse_jobs_are_refused() -> None:
    resolver = union({"worker": addresses(7, 9)}, {"worker": addresses(3, 6, 7)})
    with pytest.raises(
        KeyError, match=r"job 'worker' has the task indices \[7\] from two resolvers"
    ):
        resolver.cluster_spec()


def test_overlapping_dict_and_list_throw_error() -> None:
    resolver = union({"worker": WORKERS[:2]}, {"worker": addresses(1, 2, 3)})
    with pytest.raises(KeyError, match=r"\[1\]"):
        resolver.cluster_spec()


def test_overlapping_job_non_overlapping_key() -> None:
    resolver = union({"worker": addresses(5, 9)}, {"worker": addresses(3, 6, 7)})
    assert is_cluster(resolver.cluster_spec(), {"worker": addresses(3, 5, 6, 7, 9)})


def test_mixed_mode_non_overlapping_key() -> None:
    resolver = union({"worker": WORKERS[:2]}, {"worker": addresses(3, 6, 7)})
    assert is_cluster(resolver.cluster_spec(), {"worker": addresses(0, 1, 3, 6, 7)})


def test_retain_sparse_job_with_no_merging() -> None:
    assert is_cluster(
        union({"worker": addresses(1, 3, 5)}).cluster_spec(), {"worker": addresses(1, 3, 5)}
    )


# -- the rest of the contract ----------------------------------------------------------------------


def test_union_of_no_resolvers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one resolver"):
        UnionResolver()
    with pytest.raises(TypeError, match="'ps' is not a resolver"):
        UnionResolver("ps")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown arguments: environment"):
        union({"ps": PS}, environment="cloud")


def test_own_task_of_index_0_wins() -> None:
    """TensorFlow takes a task_id of 0 for none."""
    first = simple({"ps": PS}, task_type="ps", task_id=1)
    assert UnionResolver(first, task_id=0).task_id == 0
    resolver = UnionResolver(first)
    resolver.task_id = 0
    assert resolver.task_id == 0


def test_empty_job_counts_as_dense() -> None:
    """TensorFlow takes an empty job for a sparse one, and refuses the lists beside it."""
    resolver = union({"worker": []}, {"worker": WORKERS[:1]}, {"worker": WORKERS[1:]})
    assert is_cluster(resolver.cluster_spec(), {"worker": WORKERS})
    assert is_cluster(union({"worker": []}).cluster_spec(), {"worker": []})


def test_rpc_layer_of_union_in_every_master() -> None:
    resolver = UnionResolver(
        simple({"ps": PS}, master="m:1", rpc_layer="zmq"), simple({"worker": WORKERS})
    )
    assert (resolver.master(), resolver.master("worker", 0)) == ("zmq://m:1", "zmq://worker0:2222")
    resolver.rpc_layer = "grpc"
    assert (resolver.master(), resolver.master("worker", 0)) == (
        "grpc://m:1",
        "grpc://worker0:2222",
    )


def test_validate_finds_conflict() -> None:
    resolver = union({"worker": addresses(7, 9)}, {"worker": addresses(7, 10)})
    assert resolver.validate() == ["job 'worker' has the task indices [7] from two resolvers"]


def test_resolver_conforms() -> None:
    check_resolver(union({"ps": PS}, {"worker": WORKERS}, {"worker": addresses(7, 9)}))
