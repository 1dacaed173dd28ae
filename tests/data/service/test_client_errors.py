"""Every mistake that the data service tells its users of: when it is found, as which error, with
which words.

The rows are those of tf.data service's own functions; programs look at these texts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.data.service.helpers import TestCluster
from zmqdist.data import Dataset, Options
from zmqdist.data.external_state import stateful
from zmqdist.data.service import (
    CrossTrainerCache,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnimplementedError,
)

# Tasks go on in the cluster's workers when their readers have gone.
pytestmark = pytest.mark.shares_cluster

OFF, DYNAMIC, FILE = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC, ShardingPolicy.FILE
TARGET = "localhost:1"
"""Never asked: these errors are found before."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(1) as made:
        assert len(list(made.distribute(Dataset.range(10), OFF, job_name="existing"))) == 10
        yield made


# -- when the function is called -------------------------------------------------------------------

BAD_MODE = r'should be a `.*ShardingPolicy`, `"parallel_epochs"`, or `"distributed_epoch"`\. Got '

CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"processing_mode": 0}, ValueError, BAD_MODE + "0"),
    ({"processing_mode": 1}, ValueError, BAD_MODE + "1"),
    ({"processing_mode": "OFF"}, ValueError, BAD_MODE + "'OFF'"),
    ({"processing_mode": "invalid"}, ValueError, BAD_MODE),
    ({"processing_mode": None}, ValueError, BAD_MODE),
    ({"job_name": ""}, ValueError, r"`job_name` must not be empty"),
    ({"job_name": 1}, ValueError, r"`job_name` must be a string"),
    (
        {"num_consumers": 2, "consumer_index": 0},
        ValueError,
        r"`job_name` must be set when setting `num_consumers`",
    ),
    (
        {"job_name": "j", "num_consumers": 2},
        ValueError,
        r"`consumer_index` and `num_consumers` go together",
    ),
    (
        {"job_name": "j", "consumer_index": 0},
        ValueError,
        r"`consumer_index` and `num_consumers` go together",
    ),
    (
        {"job_name": "j", "consumer_index": 2, "num_consumers": 2},
        ValueError,
        r"`consumer_index` is 2, wants 0 to 1",
    ),
    (
        {"job_name": "j", "consumer_index": -1, "num_consumers": 2},
        ValueError,
        r"`consumer_index` is -1",
    ),
    (
        {"max_outstanding_requests": 0},
        InvalidArgumentError,
        r"max_outstanding_requests must be positive or -1",
    ),
    (
        {"max_outstanding_requests": -2},
        InvalidArgumentError,
        r"max_outstanding_requests must be positive or -1",
    ),
    (
        {"max_outstanding_requests": "a"},
        ValueError,
        r"`max_outstanding_requests` is 'a', wants a whole number",
    ),
    (
        {"max_outstanding_requests": 1.5},
        ValueError,
        r"`max_outstanding_requests` is 1\.5, wants a whole number",
    ),
    (
        {"job_name": "j", "consumer_index": 0, "num_consumers": 0},
        ValueError,
        r"`num_consumers` is 0, wants 1 or more",
    ),
    (
        {"job_name": "j", "consumer_index": 0, "num_consumers": "2"},
        ValueError,
        r"`num_consumers` is '2', wants a whole",
    ),
    ({"data_transfer_protocol": 5}, ValueError, r"`data_transfer_protocol` is 5, wants a string"),
    (
        {"cross_trainer_cache": "a"},
        ValueError,
        r"`cross_trainer_cache` is 'a', wants a CrossTrainerCache",
    ),
    ({"ordered": "yes"}, ValueError, r"`ordered` is 'yes', wants True or False"),
    ({"delivery": "twice"}, ValueError, r"`delivery` is 'twice', wants one of"),
    (
        {"target_workers": "elsewhere"},
        InvalidArgumentError,
        r"Unrecognized target workers: elsewhere",
    ),
    ({"target_workers": 3}, InvalidArgumentError, r"Unrecognized target workers: 3"),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), CALLS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("registered", [False, True])
def test_invalid_arguments_are_refused_at_call(
    arguments: dict[str, Any], kind: type[Exception], text: str, registered: bool
) -> None:
    options = {"processing_mode": OFF, "service": TARGET, **arguments}
    call: Callable[[], Any] = (
        (lambda: from_dataset_id(dataset_id="1000", **options))
        if registered
        else (lambda: distribute(**options))
    )
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("compression", ["foo", "snappy", 1])
def test_compressions_that_do_not_exist(compression: Any) -> None:
    text = rf"Invalid `compression` argument: {compression}\. Must be one of \["
    with pytest.raises(ValueError, match=text):
        distribute(OFF, TARGET, compression=compression)
    with pytest.raises(ValueError, match=text):
        register_dataset(TARGET, Dataset.range(1), compression=compression)


@pytest.mark.parametrize("what", [None, [1, 2], "dataset", {"a": 1}])
def test_non_dataset_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match=r"wanted a zmqdist\.data\.Dataset, got "):
        distribute(OFF, TARGET)(what)
    with pytest.raises(TypeError, match=r"wanted a zmqdist\.data\.Dataset, got "):
        register_dataset(TARGET, what)


@pytest.mark.parametrize("id", [object(), 1.5, ["a"]])
def test_non_id_is_refused(id: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`dataset_id` is .*, wants the string that `register_dataset` returns"
    ):
        register_dataset(TARGET, Dataset.range(1), dataset_id=id)
    with pytest.raises(
        ValueError, match=r"`dataset_id` is .*, wants the string that `register_dataset` returns"
    ):
        from_dataset_id(OFF, TARGET, id)


@pytest.mark.parametrize("id", [None, ""])
def test_trainer_cache_needs_trainer_id(id: Any) -> None:
    with pytest.raises(ValueError, match=r"cross-trainer cache requires a non-empty trainer ID\."):
        CrossTrainerCache(id)


@pytest.mark.parametrize(
    ("arguments"),
    [
        {"target_workers": "any"},
        {"target_workers": ""},
        {"target_workers": "Local"},
        {"max_outstanding_requests": -1},
        {"max_outstanding_requests": None},
        {"max_outstanding_requests": np.int64(3)},
        {"job_name": "j", "consumer_index": 1, "num_consumers": 2},
    ],
    ids=str,
)
def test_valid_arguments_are_accepted(arguments: dict[str, Any]) -> None:
    assert callable(distribute(OFF, TARGET, **arguments))


# -- when a dataset is there -----------------------------------------------------------------------

SERVICES: list[tuple[Any, type[Exception], str]] = [
    (1, ValueError, r"`service` must be a string"),
    (None, ValueError, r"`service` must be a string"),
    (["zmq", TARGET], ValueError, r"`service` must be a string"),
    (("zmq", TARGET, 1), ValueError, r"`service` must be a string"),
    ("", ValueError, r"^`service` must not be empty$"),
    ("a://b://c", ValueError, r"Malformed `service` string has multiple '://'"),
    (
        "grapevine://a:1",
        NotFoundError,
        r"No credentials factory has been registered for protocol grapevine",
    ),
    (
        ("grapevine", "a:1"),
        NotFoundError,
        r"No credentials factory has been registered for protocol grapevine",
    ),
]


@pytest.mark.parametrize(("service", "kind", "text"), SERVICES, ids=lambda value: str(value)[:40])
def test_services_that_are_none(service: Any, kind: type[Exception], text: str) -> None:
    apply = distribute(OFF, service)
    with pytest.raises(kind, match=text):
        Dataset.range(10).apply(apply)
    with pytest.raises(kind, match=text):
        register_dataset(service, Dataset.range(10))
    with pytest.raises(kind, match=text):
        from_dataset_id(OFF, service, "1000")


def test_unserializable_dataset_is_refused(cluster: TestCluster) -> None:
    lock = threading.Lock()

    def locked(x: Any) -> Any:
        with lock:
            return x

    text = "Serialization error while trying to register a dataset with tf.data service"
    with pytest.raises(FailedPreconditionError, match=text) as raised:
        cluster.distribute(Dataset.range(10).map(locked))
    assert "lock" in str(raised.value)
    assert isinstance(raised.value.__cause__, FailedPreconditionError)


def test_external_state_that_is_not_allowed(cluster: TestCluster) -> None:
    options = Options()
    options.experimental_external_state_policy = "FAIL"
    dataset = Dataset.range(10).map(stateful(lambda x: x)).with_options(options)
    with pytest.raises(FailedPreconditionError, match="external state"):
        register_dataset(cluster.target, dataset)


def test_datasets_that_are_not_registered(cluster: TestCluster) -> None:
    with pytest.raises(ValueError, match="Failed to fetch element spec for dataset id 77"):
        from_dataset_id(OFF, cluster.target, 77)
    with pytest.raises(
        NotFoundError,
        match=r"Dataset id 77 not found\. It must be registered with `register_dataset`",
    ):
        from_dataset_id(OFF, cluster.target, 77, element_spec=zd.TensorSpec([], np.int64))


# -- when it is read -------------------------------------------------------------------------------


READS: list[tuple[str, Callable[[TestCluster], Any], type[OpError], str]] = [
    (
        "mode",
        lambda cluster: cluster.distribute(Dataset.range(10), DYNAMIC, job_name="existing"),
        InvalidArgumentError,
        (
            r"create job with name existing, but found an existing job with different parameters: "
            r"Existing processing mode: <OFF>; got"
        ),
    ),
    (
        "target",
        lambda cluster: cluster.distribute(
            Dataset.range(10), OFF, job_name="existing", target_workers="ANY"
        ),
        InvalidArgumentError,
        r"Existing target workers: <AUTO>; got <ANY>\.$",
    ),
    (
        "cache",
        lambda cluster: cluster.distribute(
            Dataset.range(10).repeat(),
            OFF,
            job_name="existing",
            cross_trainer_cache=CrossTrainerCache("me"),
        ),
        InvalidArgumentError,
        r"Existing cross-trainer cache: <disabled>; got <enabled>\.",
    ),
    (
        "spec",
        lambda cluster: from_dataset_id(
            OFF,
            cluster.target,
            register_dataset(cluster.target, Dataset.range(10)),
            element_spec=zd.TensorSpec([], np.dtype(str)),
        ),
        InvalidArgumentError,
        r"element",
    ),
    (
        "protocol",
        lambda cluster: cluster.distribute(Dataset.range(10), data_transfer_protocol="pigeon"),
        NotFoundError,
        r"Protocol 'pigeon' is not available for worker 'localhost:\d+'",
    ),
    (
        "static",
        lambda cluster: cluster.distribute(Dataset.range(10), FILE),
        NotFoundError,
        r"Worker localhost:\d+ is not in the workers list\.",
    ),
    (
        "nested",
        lambda cluster: cluster.distribute(cluster.distribute(Dataset.range(10)), DYNAMIC),
        UnimplementedError,
        r"Cannot create split providers for dataset of type DataServiceDataset",
    ),
    (
        "snapshot",
        lambda cluster: cluster.distribute(Dataset.range(10).snapshot("/nowhere"), DYNAMIC),
        UnimplementedError,
        r"Splitting is not implemented for snapshot datasets",
    ),
]


@pytest.mark.parametrize(
    ("make", "kind", "text"), [row[1:] for row in READS], ids=[row[0] for row in READS]
)
def test_arguments_are_refused_at_read(
    cluster: TestCluster, make: Callable[[TestCluster], Dataset], kind: type[OpError], text: str
) -> None:
    dataset = make(cluster)
    with pytest.raises(kind, match=text) as raised:
        list(dataset)
    assert raised.value.code == kind.code
    assert raised.value.message


def test_pipeline_error_keeps_class_and_costs_one_element(
    cluster: TestCluster,
) -> None:
    def fail(x: Any) -> Any:
        if x == 1:
            raise zd.errors.OutOfRangeError(None, None, "one is too many")
        return x

    iterator = iter(cluster.distribute(Dataset.range(3).map(fail)))
    assert next(iterator) == 0
    with pytest.raises(zd.errors.OutOfRangeError, match="one is too many"):
        next(iterator)
    assert [int(each) for each in iterator] == [2]
