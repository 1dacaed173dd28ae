"""`distribute`, `register_dataset` and `from_dataset_id`, with which this program reads a pipeline
that runs on the workers of a data service.

Each function checks its arguments at once, but `distribute` does not check `service`. The
transformation that `distribute` returns checks `service` and registers a dataset when
`Dataset.apply` applies the transformation. This program requests elements only after it has created
an iterator. Error texts that programs may depend on are the same as in tf.data service.
"""

from __future__ import annotations

import json
import operator
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zmqdist import clock as time
from zmqdist.data.dataset import Dataset
from zmqdist.data.external_state import check_external_state
from zmqdist.data.service.dispatcher.machine.records import AT_MOST_ONCE, EXACTLY_ONCE
from zmqdist.data.service.policy import CrossTrainerCache, ShardingPolicy, policy_of
from zmqdist.data.service.service_address import Service, service_of
from zmqdist.data.service.source import Distributed
from zmqdist.data.service.split_requests import call_until_answered
from zmqdist.data.sharding import distributed_cardinality
from zmqdist.data.splits import portion_rules
from zmqdist.data.structure import UNKNOWN_SPEC, declared_spec, from_json, invalid, to_json
from zmqdist.data.tree import Tree
from zmqdist.errors import FailedPreconditionError, NotFoundError
from zmqdist.rpc.client import ZmqClient

REGISTER_S = 3600.0
"""Seconds that registration waits for a dispatcher, as in tf.data service."""

COMPRESSIONS = ("AUTO", None, "SNAPPY", "ZSTD", "LZ4", "GZIP")
DELIVERIES = (AT_MOST_ONCE, EXACTLY_ONCE)
TARGET_WORKERS = ("AUTO", "ANY", "LOCAL")
ON_CONFLICT = ("keep", "replace", "error")


def distribute(
    processing_mode: Any,
    service: Any,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    *,
    delivery: str = "at_most_once",
    ordered: bool = False,
) -> Callable[[Dataset], Dataset]:
    """Return a transformation for `Dataset.apply`. The operators before the transformation run on
    the service's workers, and the operators after it run in this program.

    >>> distributed = zd.data.service.distribute("distributed_epoch", cluster)
    >>> print(*sorted(Dataset.range(5).apply(distributed)))
    0 1 2 3 4

    Use it when one program cannot compute elements fast enough. Applying the transformation
    registers the dataset, and blocks until a dispatcher replies, for up to an hour.
    docs/data_service.md explains the arguments that are not listed here, which are as in tf.data
    service.

    Args:
      processing_mode: a ShardingPolicy, "parallel_epochs" (OFF) or "distributed_epoch" (DYNAMIC).
      service: the dispatcher, as "host:port", "zmq://host:port", a DispatchServer, a local_cluster,
        or a coordinator.
      delivery: with "at_most_once" and DYNAMIC, the elements that a worker holds when it dies are
        lost. Under the other policies, a restarted worker sends its elements again from the
        beginning. With "exactly_once", other workers compute the elements of a dead worker again,
        each element is delivered once, and the iterator has a state.
      ordered: if True, the elements are delivered exactly once, in the pipeline's own order. This
        and "exactly_once" require "distributed_epoch" (docs/delivery.md).

    Raises (when `distribute` is called):
      ValueError, InvalidArgumentError: an argument is invalid, or two arguments exclude each other.
    Raises (when the transformation is applied):
      TypeError: the argument of `apply` is not a Dataset.
      ValueError, NotFoundError: `service` is not an address, or names an unknown protocol.
      FailedPreconditionError: as for `register_dataset`.
      DeadlineExceededError: no dispatcher replied within an hour.
      UnimplementedError: "exactly_once" or `ordered` was requested, and the pipeline cannot be cut
        into portions.
    """
    read = _checked(
        processing_mode,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        data_transfer_protocol,
        cross_trainer_cache,
        target_workers,
        delivery,
        ordered,
    )
    _check_compression(compression)

    def apply(dataset: Dataset) -> Dataset:
        check_dataset(dataset)
        if ordered or delivery == EXACTLY_ONCE:
            # raise an error here if the pipeline cannot be cut into portions
            portion_rules(dataset)
        id = register_dataset(service, dataset, compression)
        dataset_read = _reading(service_of(service), id, _metadata_of(dataset, compression), read)
        dataset_read.op.__dict__["upstream"] = dataset
        return dataset_read

    return apply


def register_dataset(
    service: Any,
    dataset: Dataset,
    compression: str | None = "AUTO",
    dataset_id: Any = None,
    *,
    on_conflict: str = "keep",
) -> str:
    """Register a dataset with the service. Return the dataset's id, for `from_dataset_id` in this
    program or another program.

    >>> zd.data.service.register_dataset(cluster, Dataset.range(3), dataset_id="three")
    'three'

    Use this when several programs read one pipeline, and only one of these programs has the
    pipeline's code. Blocks until a dispatcher replies, for up to an hour. No element is computed.

    Args:
      dataset_id: the id to register. With None the dispatcher chooses a new id.
      on_conflict: what to do if another pipeline with elements of the same structure has this id:
        "keep" the other pipeline, "replace" it by this dataset, or raise an "error".

    Raises:
      TypeError: `dataset` is not a Dataset.
      ValueError, NotFoundError: an argument is invalid.
      InvalidArgumentError: a dataset of another structure, compression or length has this id.
      AlreadyExistsError: another pipeline has this id, and `on_conflict` is "error".
      FailedPreconditionError: the dataset cannot be serialized, or it depends on external state and
        its options forbid that.
      DeadlineExceededError: no dispatcher replied within an hour.
    """
    _check_compression(compression)
    if on_conflict not in ON_CONFLICT:
        raise ValueError(f"`on_conflict` is {on_conflict!r}, wants one of {list(ON_CONFLICT)}")
    check_dataset(dataset)
    at = service_of(service)
    request = secrets.randbits(62)
    id = None if dataset_id is None else id_of(dataset_id)
    check_external_state(dataset)
    try:
        description = dataset.serialize()
    except FailedPreconditionError as error:
        text = f"Serialization error while trying to register a dataset with tf.data service: {error.message}"
        raise FailedPreconditionError(text) from error
    metadata = json.dumps(_metadata_of(dataset, compression), sort_keys=True)
    args = (request, id, description, metadata, on_conflict)
    id_registered, _ = ask_dispatcher(
        at, "register", *args, purpose=f"registering a dataset with {at.address}"
    )
    return str(id_registered)


def from_dataset_id(
    processing_mode: Any,
    service: Any,
    dataset_id: Any,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    *,
    delivery: str = "at_most_once",
    ordered: bool = False,
) -> Dataset:
    """Return a dataset of the elements of a registered pipeline. `distribute` explains the
    arguments that are not listed here.

    >>> id = zd.data.service.register_dataset(cluster, Dataset.range(4))
    >>> print(*sorted(zd.data.service.from_dataset_id("distributed_epoch", cluster, id)))
    0 1 2 3

    Requests the dataset's metadata from the dispatcher, and blocks until the dispatcher replies,
    for up to an hour.

    Args:
      dataset_id: the id that `register_dataset` returned or was given.
      element_spec: the spec of the elements. None means the spec with which the dataset was
        registered. Iterators compare the elements with this spec. If it is None and the dataset was
        registered before its spec was known, iterators compare nothing, and the property
        `element_spec` of the returned dataset raises FailedPreconditionError.

    Raises:
      ValueError: no dataset with this id is registered, and `element_spec` is None.
      NotFoundError: no dataset with this id is registered, and `element_spec` is passed.
      DeadlineExceededError: no dispatcher replied within an hour.
    """
    read = _checked(
        processing_mode,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        data_transfer_protocol,
        cross_trainer_cache,
        target_workers,
        delivery,
        ordered,
    )
    at = service_of(service)
    id, element_spec = id_of(dataset_id), declared_spec("element_spec", element_spec)
    try:
        metadata = json.loads(
            ask_dispatcher(at, "metadata", id, purpose=f"asking {at.address} for dataset {id}")
        )
    except NotFoundError as error:
        if element_spec is None:
            raise ValueError(
                f"Failed to fetch element spec for dataset id {id} from tf.data service: "
                f"{error.message}"
            ) from error
        raise
    if element_spec is not None:
        metadata["element_spec"] = to_json(element_spec)
    if job_name is not None:
        read["job_name"] = f"dataset_id={id}/{job_name}"
    return _reading(at, id, metadata, read)


def id_of(dataset_id: Any) -> str:
    """Return a dataset id as text. Accepts str, bytes, int, or one of these in a NumPy array of
    rank 0. Otherwise raises ValueError."""
    value = dataset_id.item() if hasattr(dataset_id, "item") else dataset_id
    if not isinstance(value, (str, bytes, int)):
        raise ValueError(
            f"`dataset_id` is {dataset_id!r}, wants the string that `register_dataset` returns"
        )
    return value.decode() if isinstance(value, bytes) else str(value)


def _checked(
    processing_mode: Any,
    job_name: Any,
    consumer_index: Any,
    num_consumers: Any,
    max_outstanding_requests: Any,
    data_transfer_protocol: Any,
    cross_trainer_cache: CrossTrainerCache | None,
    target_workers: str,
    delivery: str,
    ordered: bool,
) -> dict[str, Any]:
    """Return the fields of the operator `Distributed` that these arguments determine. Raises
    ValueError or InvalidArgumentError if an argument is invalid.
    """
    mode = policy_of(processing_mode)
    if job_name is not None and not isinstance(job_name, str):
        raise ValueError(
            f"`job_name` must be a string, but `job_name` was of type {type(job_name)}."
        )
    if job_name == "":
        raise ValueError("`job_name` must not be empty")
    if num_consumers is not None and job_name is None:
        raise ValueError("`job_name` must be set when setting `num_consumers`")
    if (consumer_index is None) != (num_consumers is None):
        raise ValueError("`consumer_index` and `num_consumers` go together: give both or none")
    consumer_index = _number("consumer_index", consumer_index)
    num_consumers = _number("num_consumers", num_consumers)
    if num_consumers is not None and num_consumers < 1:
        raise ValueError(f"`num_consumers` is {num_consumers}, wants 1 or more")
    if num_consumers is not None and not 0 <= consumer_index < num_consumers:
        raise ValueError(f"`consumer_index` is {consumer_index}, wants 0 to {num_consumers - 1}")
    max_outstanding_requests = _number("max_outstanding_requests", max_outstanding_requests)
    if (
        max_outstanding_requests is not None
        and max_outstanding_requests != -1
        and max_outstanding_requests < 1
    ):
        raise invalid(
            f"max_outstanding_requests must be positive or -1, got {max_outstanding_requests}"
        )
    if data_transfer_protocol is not None and not isinstance(data_transfer_protocol, str):
        raise ValueError(f"`data_transfer_protocol` is {data_transfer_protocol!r}, wants a string")
    if cross_trainer_cache is not None and not isinstance(cross_trainer_cache, CrossTrainerCache):
        raise ValueError(
            f"`cross_trainer_cache` is {cross_trainer_cache!r}, wants a CrossTrainerCache"
        )
    if not isinstance(ordered, bool):
        raise ValueError(f"`ordered` is {ordered!r}, wants True or False")
    if delivery not in DELIVERIES:
        raise ValueError(f"`delivery` is {delivery!r}, wants one of {list(DELIVERIES)}")
    if (ordered or delivery == EXACTLY_ONCE) and (
        mode != ShardingPolicy.DYNAMIC or cross_trainer_cache is not None
    ):
        raise invalid(
            'delivery="exactly_once" and ordered=True are for ShardingPolicy.DYNAMIC '
            '("distributed_epoch") without a cross-trainer cache: '
            "otherwise workers give the same elements more than once"
        )
    target = str(target_workers or "AUTO").upper()
    if target not in TARGET_WORKERS:
        raise invalid(
            f"Unrecognized target workers: {target_workers}. `target_workers` must be one of "
            f"{list(TARGET_WORKERS)}"
        )
    return {
        "mode": int(mode),
        "job_name": job_name,
        "consumer_index": -1 if consumer_index is None else int(consumer_index),
        "num_consumers": int(num_consumers or 0),
        "max_outstanding": max_outstanding_requests or -1,
        "protocol": data_transfer_protocol or "",
        "trainer": "" if cross_trainer_cache is None else cross_trainer_cache.trainer_id,
        "target_workers": target,
        "delivery": delivery,
        "ordered": ordered,
    }


def _number(name: str, value: Any) -> Any:
    """Check an optional argument that is a whole number. Return it as an int, or None. Raises
    ValueError for other values."""
    try:
        return value if value is None else operator.index(value)
    except TypeError:
        raise ValueError(f"`{name}` is {value!r}, wants a whole number") from None


def check_dataset(dataset: Any) -> None:
    """Raise TypeError if the argument `dataset` is not a Dataset."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"a data service runs datasets: wanted a zmqdist.data.Dataset, got "
            f"{type(dataset).__name__}"
        )


def _check_compression(compression: Any) -> None:
    if compression not in COMPRESSIONS:
        raise ValueError(
            f"Invalid `compression` argument: {compression}. Must be one of {list(COMPRESSIONS)}"
        )


def _metadata_of(dataset: Tree, compression: str | None) -> dict[str, Any]:
    spec = dataset.known_spec
    return {
        "element_spec": None if spec is UNKNOWN_SPEC else to_json(spec),
        "compression": compression,
        "cardinality": dataset.cardinality(),
    }


def _reading(service: Service, id: str, metadata: dict[str, Any], read: dict[str, Any]) -> Dataset:
    spec = metadata["element_spec"]
    policy = ShardingPolicy(read["mode"]).name
    return Dataset(
        Distributed(
            service=service.address,
            token_file=service.token_file,
            keys_dir=service.keys_dir,
            insecure=service.insecure,
            dataset=id,
            spec=None if spec is None else from_json(spec),
            compression=metadata["compression"],
            count=distributed_cardinality(
                metadata["cardinality"], policy, bool(read["num_consumers"])
            ),
            **read,
        )
    )


def ask_dispatcher(
    service: Service, method: str, *args: Any, purpose: str, timeout_s: float = REGISTER_S
) -> Any:
    """Call a method of a dispatcher, and repeat the call, also across restarts of the dispatcher,
    until the dispatcher replies. Raises DeadlineExceededError if no dispatcher replies in time.
    """
    due = time.monotonic() + timeout_s
    security = service.credentials.client(service.address, "submit")
    with ZmqClient(service.address, "data client", security=security) as client:
        return call_until_answered(
            client,
            method,
            *args,
            purpose=purpose,
            stop_event=threading.Event(),
            timeout_s=timeout_s,
            due=due,
        )


def _distribute(
    *args: Any, task_refresh_interval_hint_ms: int | None = None, **options: Any
) -> Callable[[Dataset], Dataset]:
    """Call `distribute` with an option for tests. `task_refresh_interval_hint_ms` is the pause, in
    milliseconds, that a reader makes between two watch requests.
    """
    apply = distribute(*args, **options)
    return lambda dataset: _refreshed(apply(dataset), task_refresh_interval_hint_ms)


def _from_dataset_id(
    *args: Any, task_refresh_interval_hint_ms: int | None = None, **options: Any
) -> Dataset:
    """Call `from_dataset_id` with an option for tests. `task_refresh_interval_hint_ms` is the
    pause, in milliseconds, that a reader makes between two watch requests.
    """
    return _refreshed(from_dataset_id(*args, **options), task_refresh_interval_hint_ms)


_register_dataset = register_dataset


def _refreshed(dataset: Dataset, hint_ms: int | None) -> Dataset:
    if hint_ms is None or hint_ms < 0:
        return dataset
    refreshed = Dataset(replace(dataset.op, refresh_ms=hint_ms))  # type: ignore[call-arg]
    refreshed.op.__dict__.update(upstream=dataset.op.__dict__.get("upstream"))
    return refreshed
