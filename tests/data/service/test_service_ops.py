"""tf.data service's own tests of its operations (data_service_ops_test.py), row by row: a test is
called as its row there."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.data.service.helpers import TestCluster, until, values
from tests.ports import free_port
from zmqdist.data import Dataset, Options
from zmqdist.data.external_state import stateful
from zmqdist.data.service import ShardingPolicy, distribute, from_dataset_id, register_dataset
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.servers.dispatch_server import DispatchServer

# Tasks go on in the cluster's workers when their readers have gone.
pytestmark = pytest.mark.shares_cluster

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC
TEN = list(range(10))
MEMORY: dict[str, Any] = {"work_dir": "", "fault_tolerant_mode": False}


@pytest.fixture(scope="module")
def one() -> Iterator[TestCluster]:
    with TestCluster(1, **MEMORY) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two() -> Iterator[TestCluster]:
    with TestCluster(2, **MEMORY) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[TestCluster]:
    with TestCluster(3, **MEMORY) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_reader_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    until(
        lambda: not [each for each in threading.enumerate() if _reads(each) and each not in before],
        "readers go",
    )


def _reads(thread: threading.Thread) -> bool:
    return thread.name.startswith("zmqdist-reader")


def range_dataset(cluster: TestCluster, count: int = 10, **options: Any) -> Dataset:
    return cluster.distribute(Dataset.range(count), **options)


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"fault_tolerant_mode": False}, {"work_dir": "", "fault_tolerant_mode": False}],
    ids=str,
)
def test_distribute_basic(options: dict[str, Any]) -> None:
    with TestCluster(1, **options) as cluster:
        assert values(range_dataset(cluster)) == TEN


@pytest.mark.parametrize("compression", [None, "AUTO", "SNAPPY", "ZSTD", "LZ4", "GZIP"])
def test_distribute_compression(one: TestCluster, compression: str | None) -> None:
    assert values(range_dataset(one, compression=compression)) == TEN


def test_distribute_invalid_compression(one: TestCluster) -> None:
    with pytest.raises(ValueError, match="Invalid `compression` argument: foo"):
        range_dataset(one, compression="foo")


def test_distribute_sparse(one: TestCluster) -> None:
    """A sparse element is its indices, values and shape."""
    sparse = {"indices": np.array([[0]]), "values": np.array([0], np.int32), "shape": np.array([1])}
    (element,) = one.distribute(Dataset.from_tensors(sparse))
    assert {key: value.tolist() for key, value in element.items()} == {
        "indices": [[0]],
        "values": [0],
        "shape": [1],
    }
    assert element["values"].dtype == np.int32


def test_distribute_ragged(one: TestCluster) -> None:
    dataset = Dataset.from_tensor_slices([1, 5, 3, 2, 8]).map(np.arange).ragged_batch(2)
    batches = [np.split(batch.values, batch.row_splits[1:-1]) for batch in one.distribute(dataset)]
    padded = [
        [each.tolist() + [0] * (max(map(len, batch)) - len(each)) for each in batch]
        for batch in batches
    ]
    assert padded == [
        [[0, 0, 0, 0, 0], [0, 1, 2, 3, 4]],
        [[0, 1, 2], [0, 1, 0]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_distribute_lookup_table(one: TestCluster, nested: bool) -> None:
    table = {0: 10, 1: 11}

    def look(x: Any) -> Any:
        found = table.get(int(x), -1)
        return {"a": (found, found)} if nested else found

    elements = list(one.distribute(Dataset.range(3).map(look)))
    assert [int(each["a"][1]) if nested else int(each) for each in elements] == [10, 11, -1]


def test_distribute_mutable_hash_table(one: TestCluster) -> None:
    """What a function refers to is copied when the dataset is registered."""
    table = {0: 10, 1: 11}
    dataset = one.distribute(Dataset.range(3).map(lambda x: table.get(int(x), -1)))
    table[2] = 12
    assert values(dataset) == [10, 11, -1]


@pytest.mark.parametrize("seed", [None, 10])
def test_shuffle_order(seed: int | None) -> None:
    """Without a seed each worker draws its own."""
    orders = []
    with TestCluster(2) as cluster:
        dataset = (
            Dataset.range(100)
            .shuffle(100, seed=seed)
            .map(lambda x: (threading.current_thread().name, x))
        )
        by_worker: dict[str, list[int]] = {}
        for name, x in cluster.distribute(dataset, max_outstanding_requests=2):
            by_worker.setdefault(str(name), []).append(int(x))
        orders = list(by_worker.values())
    assert [sorted(order) for order in orders] == [list(range(100))] * 2
    assert (orders[0] == orders[1]) == (seed is not None)


def test_multiple_epochs(one: TestCluster) -> None:
    dataset = range_dataset(one, 100)
    for _ in range(10):
        assert values(dataset) == list(range(100))


def test_repeated_dataset(one: TestCluster) -> None:
    assert values(range_dataset(one).repeat(5)) == TEN * 5


def test_concurrent_epoch(one: TestCluster) -> None:
    iterators = [iter(range_dataset(one)) for _ in range(3)]
    read = [[int(next(iterator)) for iterator in iterators] for _ in range(10)]
    assert read == [[x] * 3 for x in range(10)]
    assert [next(iterator, None) for iterator in iterators] == [None] * 3


@pytest.mark.parametrize("outstanding", [None, 1])
def test_multi_worker(three: TestCluster, outstanding: int | None) -> None:
    """And MaxOutstandingRequests."""
    assert sorted(values(range_dataset(three, max_outstanding_requests=outstanding))) == sorted(
        TEN * 3
    )


def test_inside_function(three: TestCluster) -> None:
    def inside() -> list[int]:
        return values(range_dataset(three))

    assert sorted(inside()) == sorted(TEN * 3)


def test_generator_is_read(one: TestCluster) -> None:
    def generate() -> Iterator[int]:
        yield from range(10)

    spec = zd.TensorSpec([], np.int64)
    assert values(one.distribute(Dataset.from_generator(generate, output_signature=spec))) == TEN


def test_apply_determinism_option(one: TestCluster) -> None:
    """An element that is late does not hold up the others; which come first nobody knows."""
    late = Options()
    late.deterministic = False
    dataset = Dataset.range(10).interleave(
        lambda x: Dataset.from_tensors(x), cycle_length=4, num_parallel_calls=4, deterministic=None
    )
    assert sorted(values(one.distribute(dataset.with_options(late)))) == TEN


@pytest.mark.filterwarnings("ignore:the dataset depends on external state")
@pytest.mark.parametrize("policy", ["IGNORE", "WARN"])
def test_stateful_no_error(three: TestCluster, policy: str) -> None:
    dataset = Dataset.range(10).map(stateful(lambda x: np.random.default_rng().integers(10)))
    options = Options()
    options.experimental_external_state_policy = policy
    assert len(values(three.distribute(dataset.with_options(options)))) == 30


def test_stateful_pipeline_warns_by_default(one: TestCluster) -> None:
    with pytest.warns(UserWarning, match="external state"):
        one.distribute(Dataset.random().take(3))


def test_stateful_error(three: TestCluster) -> None:
    options = Options()
    options.experimental_external_state_policy = "FAIL"
    with pytest.raises(FailedPreconditionError, match="external state"):
        three.distribute(Dataset.range(10).map(stateful(lambda x: x)).with_options(options))


def test_distribute_from_interleave(one: TestCluster) -> None:
    target = one.target

    def distributed(x: Any) -> Dataset:
        return Dataset.range(10 * int(x), 10 * int(x) + 2).apply(distribute(OFF, target))

    assert values(Dataset.range(2).interleave(distributed, cycle_length=2)) == [0, 10, 1, 11]


def test_batch_drops_all_elements(two: TestCluster) -> None:
    assert values(two.distribute(Dataset.range(10).batch(1000, drop_remainder=True))) == []


def test_batch_does_not_drop_remainder(two: TestCluster) -> None:
    assert values(two.distribute(Dataset.range(10).batch(1000, drop_remainder=False))) == [TEN, TEN]


def test_variables(one: TestCluster) -> None:
    variable = np.array(10)
    assert values(one.distribute(Dataset.range(3).map(lambda x: x + variable))) == [10, 11, 12]


def test_policy_off_reads_all(one: TestCluster) -> None:
    assert values(one.distribute(Dataset.range(20), OFF)) == list(range(20))


def test_distribute_explicit_protocol(one: TestCluster) -> None:
    address = one.dispatcher_address()
    for service in (f"zmq://{address}", f"tcp://{address}", ("zmq", address)):
        assert values(Dataset.range(10).apply(distribute(OFF, service))) == TEN


def test_double_distribute(one: TestCluster) -> None:
    assert values(one.distribute(one.distribute(Dataset.range(10)))) == TEN


def test_two_level_distribute() -> None:
    words = [str(size) * size for size in (1, 2, 3, 4, 5) for _ in range(5)]
    with TestCluster(3) as first, TestCluster(1) as second:
        dataset = first.distribute(Dataset.from_tensor_slices(words))
        dataset = dataset.group_by_window(
            key_func=lambda x: np.int64(len(x)),
            reduce_func=lambda _, each: each.batch(5),
            window_size=15,
        )
        batches = [
            batch.tolist() for batch in second.distribute(dataset, max_outstanding_requests=1)
        ]
    sizes = [len(batch[0]) for batch in batches]
    assert sorted(sizes) == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3
    assert all(batch == [batch[0]] * 5 for batch in batches)
    assert all(len(set(sizes[start : start + 3])) == 1 for start in range(0, 15, 3))


def test_distribute_large_graph() -> None:
    large = np.zeros(8 << 20, np.uint8)
    large[-1] = 7
    with TestCluster(1, work_dir="", fault_tolerant_mode=False) as cluster:
        (element,) = cluster.distribute(Dataset.from_tensors(large))
    assert element.nbytes == 8 << 20
    assert element[-1] == 7


def test_start_servers_late() -> None:
    with TestCluster(1, start=False) as cluster:
        cluster.dispatcher = DispatchServer(
            DispatcherConfig(port=(port := free_port())), start=False
        )
        starter = threading.Timer(0.5, cluster.start_dispatcher)
        starter.start()
        dataset = Dataset.range(10).apply(distribute(OFF, f"localhost:{port}"))
        starter.join()
        adder = threading.Timer(0.2, cluster.start_workers)
        adder.start()
        assert values(dataset) == TEN
        adder.join()


@pytest.mark.parametrize("ahead", [0, 1])
def test_cancellation(one: TestCluster, ahead: int) -> None:
    """An iterator whose element takes for ever can be dropped, by any thread."""
    began, over = threading.Event(), threading.Event()
    stuck[:] = [began, over]
    iterator = iter(one.distribute(Dataset.range(1).map(_wait)).prefetch(ahead))
    reader = threading.Thread(target=lambda: next(iterator, None), daemon=True)
    reader.start()
    assert began.wait(20)
    iterator.close()
    reader.join(20)
    assert not reader.is_alive()
    over.set()


def _opened_later(how: str, dataset: Dataset) -> Dataset:
    """A pipeline that joins an iteration when it is read, in this thread or another."""
    match how:
        case "interleave":
            return Dataset.range(2).interleave(lambda _: dataset, cycle_length=1)
        case "prefetch":
            return Dataset.range(2).flat_map(lambda _: dataset).prefetch(2)
    return dataset if how == "" else dataset.prefetch(2)


@pytest.mark.parametrize("how", ["", "ordered and prefetch", "interleave", "prefetch"])
def test_iterator_can_close_while_dispatcher_is_away(how: str) -> None:
    with TestCluster(1) as cluster:
        dataset = cluster.distribute(
            Dataset.range(10), DYNAMIC, ordered=how in ("", "ordered and prefetch")
        )
    iterator = iter(_opened_later(how, dataset))
    ends: list[Any] = []
    reader = threading.Thread(target=lambda: ends.append(next(iterator, "the end")), daemon=True)
    reader.start()
    until(lambda: any(each.name == "zmqdist-reader" for each in threading.enumerate()), "it opens")
    closing = threading.Thread(target=iterator.close, daemon=True)
    closing.start()
    for each in (closing, reader):
        each.join(20)
        assert not each.is_alive()
    assert ends == ["the end"]


stuck: list[threading.Event] = []


def _wait(x: Any) -> Any:
    from tests.data.service import test_service_ops

    began, over = test_service_ops.stuck
    began.set()
    over.wait(1000)
    return x


# -- names of jobs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", 1])
@pytest.mark.parametrize("registered", [False, True])
def test_empty_or_non_string_job_name(one: TestCluster, name: Any, registered: bool) -> None:
    text = "`job_name` must not be empty" if name == "" else "`job_name` must be a string"
    id = register_dataset(one.target, Dataset.range(10))
    if registered:
        with pytest.raises(ValueError, match=text):
            from_dataset_id(OFF, one.target, id, job_name=name)
    else:
        with pytest.raises(ValueError, match=text):
            distribute(OFF, one.target, job_name=name)


def test_shared_job_name(one: TestCluster) -> None:
    count = 1000
    shuffled = [Dataset.range(count).shuffle(count) for _ in range(2)]
    # None may take all at once.
    datasets = [
        one.distribute(each, job_name="shared", max_outstanding_requests=10) for each in shuffled
    ]
    iterators = [iter(dataset) for dataset in datasets]
    read = [int(next(iterator)) for _ in range(200) for iterator in iterators]
    for iterator in iterators:
        read += map(int, iterator)
    assert sorted(read) == list(range(count))


def test_different_job_names(one: TestCluster) -> None:
    assert [values(range_dataset(one, job_name=f"job{n}")) for n in (1, 2)] == [TEN, TEN]


def test_shared_job_name_multi_iteration(one: TestCluster) -> None:
    first, second = (range_dataset(one, job_name="several") for _ in range(2))
    assert values(first) == TEN
    assert values(second) == []
    assert values(second) == TEN
    assert values(first) == []


def test_shared_job_name_repeat(one: TestCluster) -> None:
    datasets = [range_dataset(one, 100, job_name="repeated").repeat(3) for _ in range(2)]
    first, second = map(iter, datasets)
    read = [int(next(iterator)) for _ in range(10) for iterator in (first, second)]
    read += map(int, first)
    read += map(int, second)
    assert Counter(read) == Counter(list(range(100)) * 3)


def test_shared_job_name_repeat_empty_job(one: TestCluster) -> None:
    first, second = (range_dataset(one, job_name="endless").repeat() for _ in range(2))
    with iter(first) as iterator:
        assert [int(next(iterator)) for _ in range(30)] == TEN * 3
    with iter(second) as iterator:
        assert len([next(iterator) for _ in range(30)]) == 30


def test_shared_job_name_multiple_epochs(one: TestCluster) -> None:
    dataset = range_dataset(one, job_name="epochs")
    for _ in range(5):
        assert values(dataset) == TEN


def test_zip_different_processing_modes_datasets(one: TestCluster) -> None:
    pair = [one.distribute(Dataset.range(100), mode) for mode in (DYNAMIC, OFF)]
    assert [(int(a), int(b)) for a, b in Dataset.zip(*pair)] == [(i, i) for i in range(100)]


def test_zip_different_processing_modes_datasets_shared_job_name(one: TestCluster) -> None:
    pair = [one.distribute(Dataset.range(100), mode, job_name="both") for mode in (DYNAMIC, OFF)]
    with pytest.raises(InvalidArgumentError, match="but found an existing job with diff"):
        list(Dataset.zip(*pair))


def test_job_has_one_element_structure(one: TestCluster) -> None:
    assert values(range_dataset(one, job_name="form")) == TEN
    other = one.distribute(Dataset.from_tensor_slices(["a"]), job_name="form")
    with pytest.raises(
        InvalidArgumentError,
        match="existing job with different parameters: The elements have another",
    ):
        list(other)
