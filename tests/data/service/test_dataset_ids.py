"""Registered datasets: tf.data service's own tests of ids and of metadata
(data_service_ops_test.py, metadata_test.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.data.service.helpers import TestCluster, values
from zmqdist.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from zmqdist.data.experimental import SHARD_HINT
from zmqdist.data.service import ShardingPolicy, distribute, from_dataset_id, register_dataset
from zmqdist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)

# Tasks go on in the cluster's workers when their readers have gone.
pytestmark = pytest.mark.shares_cluster

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC
TEN = list(range(10))


@pytest.fixture(scope="module")
def one() -> Iterator[TestCluster]:
    with TestCluster(1) as cluster:
        yield cluster


def read(cluster: TestCluster, id: Any, **options: Any) -> list[Any]:
    return values(from_dataset_id(options.pop("mode", OFF), cluster.target, id, **options))


# -- ids -------------------------------------------------------------------------------------------


def test_dataset_id_is_read(one: TestCluster) -> None:
    assert read(one, register_dataset(one.target, Dataset.range(10))) == TEN


@pytest.mark.parametrize("form", [str, str.encode, np.str_, np.array, np.bytes_, int], ids=str)
def test_string_dataset_id(one: TestCluster, form: Callable[[str], Any]) -> None:
    """And PyStringDatasetId."""
    id = register_dataset(one.target, Dataset.range(10))
    assert read(one, form(id)) == TEN


def test_explicit_protocol_from_dataset_id(one: TestCluster) -> None:
    """And RegisteringDatasetAsTfFunction."""
    service = ("zmq", one.dispatcher_address())
    id = register_dataset(service, Dataset.range(10))
    assert values(from_dataset_id(OFF, service, id)) == TEN


def test_dataset_id_with_shared_jobs(one: TestCluster) -> None:
    with TestCluster(2) as cluster:
        datasets = [Dataset.range(20), Dataset.from_tensor_slices(np.arange(20, 40))]
        ids = [
            register_dataset(cluster.target, each, dataset_id=f"dataset_{n}")
            for n, each in enumerate(datasets)
        ]
        readers = [
            from_dataset_id(DYNAMIC, cluster.target, id, job_name="shared")
            for id in ids
            for _ in range(2)
        ]
        together = Dataset.from_tensor_slices(np.arange(4)).interleave(
            lambda n: readers[int(n)], cycle_length=4, num_parallel_calls=4
        )
        assert sorted(values(together)) == list(range(40))


def test_dataset_id_with_several_components(one: TestCluster) -> None:
    dataset = Dataset.range(10)
    dataset = Dataset.zip({"a": (dataset, dataset), "b": dataset})
    found = from_dataset_id(OFF, one.target, register_dataset(one.target, dataset))
    assert found.element_spec == dataset.element_spec
    assert [(int(x["a"][0]), int(x["a"][1]), int(x["b"])) for x in found] == [
        (i, i, i) for i in range(10)
    ]


def test_dataset_id_with_wrong_element_spec(one: TestCluster) -> None:
    id = register_dataset(one.target, Dataset.range(10))
    wrong = from_dataset_id(OFF, one.target, id, element_spec=zd.TensorSpec([], np.dtype(bool)))
    with pytest.raises(InvalidArgumentError, match="bool"):
        list(wrong)


def test_dataset_id_not_registered(one: TestCluster) -> None:
    spec = zd.TensorSpec([], np.int64)
    with pytest.raises(NotFoundError, match=r"Dataset id nobody not found\. It must be registered"):
        from_dataset_id(OFF, one.target, "nobody", element_spec=spec)
    with pytest.raises(ValueError, match="Failed to fetch element spec for dataset id nobody"):
        from_dataset_id(OFF, one.target, "nobody")


def test_register_different_datasets(one: TestCluster) -> None:
    ids = [register_dataset(one.target, Dataset.range(count)) for count in (10, 15)]
    assert ids[0] != ids[1]
    assert [read(one, id) for id in ids] == [TEN, list(range(15))]


def test_register_with_explicit_dataset_id(one: TestCluster) -> None:
    id = register_dataset(one.target, Dataset.range(10), dataset_id="explicit")
    assert id == "explicit"
    assert [read(one, id), read(one, "explicit")] == [TEN, TEN]


def test_dataset_id_as_string(one: TestCluster) -> None:
    register_dataset(one.target, Dataset.range(10), dataset_id="literal")
    assert read(one, "literal") == TEN


def test_dataset_id_is_no_path(one: TestCluster) -> None:
    id = register_dataset(one.target, Dataset.range(10), dataset_id="../up/../../and away")
    assert read(one, id) == TEN


def test_register_same_dataset_ids(one: TestCluster) -> None:
    for _ in range(2):
        assert register_dataset(one.target, Dataset.range(10), dataset_id="same") == "same"
    readers = [from_dataset_id(OFF, one.target, "same", job_name="job") for _ in range(2)]
    assert [values(each) for each in readers] == [TEN, []]


@pytest.mark.parametrize("second", [None, "other"])
def test_register_different_dataset_ids(one: TestCluster, second: str | None) -> None:
    first = None if second is None else "one"
    ids = [register_dataset(one.target, Dataset.range(10), dataset_id=id) for id in (first, second)]
    assert ids[0] != ids[1]
    assert [read(one, id, job_name="the same") for id in ids] == [TEN, TEN]


def test_datasets_do_not_match(one: TestCluster) -> None:
    register_dataset(one.target, Dataset.range(10), dataset_id="integers")
    with pytest.raises(
        InvalidArgumentError, match="Datasets with the same ID should have the same structure"
    ):
        register_dataset(one.target, Dataset.from_tensor_slices(["a", "b"]), dataset_id="integers")


@pytest.mark.parametrize(
    "other",
    [
        lambda target: register_dataset(
            target, Dataset.range(10), compression=None, dataset_id="id of one form"
        ),
        lambda target: register_dataset(target, Dataset.range(11), dataset_id="id of one form"),
    ],
    ids=["compression", "cardinality"],
)
def test_datasets_of_one_id_agree_in_all_that_is_known_of_them(
    one: TestCluster, other: Callable[[str], str]
) -> None:
    register_dataset(one.target, Dataset.range(10), dataset_id="id of one form")
    with pytest.raises(
        InvalidArgumentError, match="Datasets with the same ID should have the same structure"
    ):
        other(one.target)


def test_inferred_spec_keeps_fingerprint() -> None:
    with TestCluster(1) as cluster:
        dataset = Dataset.range(10).map(lambda x: x)
        register_dataset(cluster.target, dataset, dataset_id="id")
        assert dataset.element_spec is not None  # computes the first element
        register_dataset(cluster.target, dataset, dataset_id="id")
        assert values(dataset.apply(distribute(OFF, cluster.target, job_name="job"))) == TEN


def test_id_conflict_keeps_replaces_or_fails(one: TestCluster) -> None:
    def register(add: int, **options: Any) -> str:
        return register_dataset(
            one.target, Dataset.range(2).map(lambda x: x + add), dataset_id="code", **options
        )

    register(1)
    register(2)
    assert read(one, "code") == [1, 2]
    with pytest.raises(
        AlreadyExistsError, match="another pipeline is registered under the dataset ID code"
    ):
        register(2, on_conflict="error")
    register(2, on_conflict="replace")
    assert read(one, "code") == [2, 3]
    with pytest.raises(ValueError, match="`on_conflict` is 'forget'"):
        register(2, on_conflict="forget")


# -- metadata --------------------------------------------------------------------------------------

INFINITE, UNKNOWN = INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

CARDINALITIES = [
    ("OFF", Dataset.range(10), UNKNOWN),
    ("DYNAMIC", Dataset.range(10), UNKNOWN),
    ("DATA", Dataset.range(10), UNKNOWN),
    ("FILE_OR_DATA", Dataset.range(10), UNKNOWN),
    ("HINT", Dataset.range(10).shard(SHARD_HINT, SHARD_HINT), UNKNOWN),
    ("OFF", Dataset.range(10).repeat(), INFINITE),
    ("DYNAMIC", Dataset.range(10).repeat(), INFINITE),
    ("DATA", Dataset.range(10).repeat(), INFINITE),
    ("FILE_OR_DATA", Dataset.range(10).repeat(), UNKNOWN),
    ("HINT", Dataset.range(10).shard(SHARD_HINT, SHARD_HINT).repeat(), UNKNOWN),
    ("OFF", Dataset.range(0), 0),
    ("DYNAMIC", Dataset.range(0), 0),
    ("DATA", Dataset.range(0), 0),
    ("FILE_OR_DATA", Dataset.range(0), 0),
    ("HINT", Dataset.range(0).shard(SHARD_HINT, SHARD_HINT), UNKNOWN),
]


@pytest.mark.parametrize(("mode", "dataset", "wanted"), CARDINALITIES)
def test_cardinality(one: TestCluster, mode: str, dataset: Dataset, wanted: int) -> None:
    policy = ShardingPolicy[mode]
    assert one.distribute(dataset, policy).cardinality() == wanted
    id = register_dataset(one.target, dataset)
    assert from_dataset_id(policy, one.target, id).cardinality() == wanted


def test_cardinality_of_coordinated_reads(one: TestCluster) -> None:
    dataset = one.distribute(
        Dataset.range(10).repeat(), OFF, job_name="j", consumer_index=0, num_consumers=2
    )
    assert dataset.cardinality() == INFINITE


def test_element_spec_of_what_is_distributed(one: TestCluster) -> None:
    spec = zd.TensorSpec([], np.float32)
    told = Dataset.range(3).map(np.float32, output_signature=spec)
    assert one.distribute(told).element_spec == told.element_spec == spec
    unknown = Dataset.range(3).map(lambda x: (x, x))
    assert one.distribute(unknown).element_spec == unknown.element_spec


def test_element_spec_that_the_service_does_not_know(one: TestCluster) -> None:
    dataset = from_dataset_id(
        OFF, one.target, register_dataset(one.target, Dataset.range(2).map(lambda x: (x, x)))
    )
    assert [tuple(map(int, each)) for each in dataset] == [(0, 0), (1, 1)]
    with pytest.raises(FailedPreconditionError, match="give it to `from_dataset_id`"):
        dataset.element_spec  # noqa: B018


@pytest.mark.parametrize("compression", [None, "AUTO", "SNAPPY"])
def test_compression_is_taken_from_the_metadata(one: TestCluster, compression: str | None) -> None:
    id = register_dataset(one.target, Dataset.range(10), compression=compression)
    assert read(one, id) == TEN
    assert from_dataset_id(OFF, one.target, id).op.compression == compression  # type: ignore[attr-defined]


def test_python_function(one: TestCluster) -> None:
    def twice(x: Any) -> Any:
        return 2 * x

    id = register_dataset(one.target, Dataset.range(3).map(twice))
    assert read(one, id) == [0, 2, 4]


def test_read_from_two_contexts(one: TestCluster) -> None:
    id = register_dataset(one.target, Dataset.range(10))
    iterators = [iter(from_dataset_id(OFF, one.target, id)) for _ in range(2)]
    assert [[int(next(each)) for each in iterators] for _ in range(10)] == [
        [x, x] for x in range(10)
    ]
    for each in iterators:
        each.close()


def test_option_pinned(one: TestCluster) -> None:
    options = zd.data.Options()
    options.experimental_service.pinned = True
    assert values(one.distribute(Dataset.range(10)).with_options(options)) == TEN
