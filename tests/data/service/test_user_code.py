"""User code that misbehaves: what its reader is told, and what goes on."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import Service, serving, until
from zmqdist.data import Dataset, FixedLengthRecordDataset, TextLineDataset
from zmqdist.data.service.client import distribute, from_dataset_id, register_dataset
from zmqdist.data.service.policy import CrossTrainerCache, ShardingPolicy
from zmqdist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from zmqdist.specs import TensorSpec


@pytest.fixture(scope="module", params=[True, False], ids=["processes", "threads"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with serving(processes=request.param) as service:
        yield service


class OwnError(Exception):
    """One that no code is known for."""


def raises_at(place: int, error: BaseException) -> Callable[[Any], Any]:
    def decode(x: Any) -> Any:
        if int(x) == place:
            raise error
        return x

    return decode


def read_all(dataset: Dataset) -> tuple[list[Any], list[OpError]]:
    """What came, and the errors between."""
    found: list[Any] = []
    problems: list[OpError] = []
    with iter(dataset) as iterator:
        while True:
            try:
                for x in iterator:
                    found.append(x)
                return found, problems
            except OpError as error:
                problems.append(error)


@pytest.mark.shares_cluster
@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("bad row"), InvalidArgumentError),
        (TypeError("bad row"), InvalidArgumentError),
        (KeyError("bad row"), UnknownError),
        (OSError("bad row"), UnknownError),
        (MemoryError("bad row"), ResourceExhaustedError),
        (NotImplementedError("bad row"), UnimplementedError),
        (OwnError("bad row"), UnknownError),
        (NotFoundError(None, None, "bad row"), NotFoundError),
        (OutOfRangeError(None, None, "bad row"), OutOfRangeError),
        (UnavailableError(None, None, "bad row"), UnknownError),
        (SystemExit("bad row"), UnknownError),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else "",
)
def test_user_error_is_named_and_costs_one_element(
    service: Service, raised: BaseException, seen: type[OpError]
) -> None:
    found, problems = read_all(
        service.whole(Dataset.range(10).map(raises_at(3, raised)), job_name=None)
    )
    assert [int(x) for x in found] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    (problem,) = problems
    assert type(problem) is seen
    text = str(problem)
    assert "bad row" in text
    for part in (
        "map(function=decode)",
        "element 3 of dataset",
        "job ",
        service.workers[0].advertised_address,
    ):
        assert part in text
    if not isinstance(raised, OpError):
        assert type(raised).__name__ in text
        assert "in decode" in text


@pytest.mark.shares_cluster
def test_failing_operator_is_named_in_any_thread(service: Service) -> None:
    dataset = (
        Dataset.range(6)
        .map(lambda x: x, num_parallel_calls=2)
        .filter(raises_at(2, ValueError("no")))
        .prefetch(2)
        .batch(1)
    )
    _, problems = read_all(service.whole(dataset))
    assert "filter(" in str(problems[0])


@pytest.mark.shares_cluster
def test_error_goes_to_one_reader(service: Service) -> None:
    dataset = service.whole(
        Dataset.range(1000).map(raises_at(500, ValueError("no"))),
        job_name=f"shared by {id(service)}",
    )
    results: list[tuple[list[Any], list[OpError]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(read_all(_again(dataset)))) for _ in range(3)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(len(problems) for _, problems in results) == 1
    assert sorted(int(x) for found, _ in results for x in found) == [
        x for x in range(1000) if x != 500
    ]


def _again(dataset: Dataset) -> Dataset:
    """The same job, read by an iterator that counts for itself."""
    return Dataset(dataset.op, dataset.inputs)


@pytest.mark.shares_cluster
def test_repeated_error_fills_no_memory(service: Service, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def fails(x: Any) -> Any:
        with calls.open("a") as file:
            file.write("x")
        raise ValueError("always")

    with iter(service.whole(Dataset.range(1000).map(fails))) as iterator:
        for _ in range(3):
            with pytest.raises(InvalidArgumentError, match="always"):
                next(iterator)
        assert calls.stat().st_size < 20


@pytest.mark.shares_cluster
def test_missing_module_is_named(service: Service) -> None:
    def needs(x: Any) -> Any:
        import no_such_module_here  # type: ignore[import-not-found]

        return no_such_module_here.decode(x)

    with pytest.raises(OpError, match="No module named 'no_such_module_here'") as caught:
        list(service.whole(Dataset.range(3).map(needs)))
    assert "Traceback at the server" in str(caught.value)


@pytest.mark.shares_cluster
def test_undeclared_structure_names_leaf(service: Service) -> None:
    signature = {"a": TensorSpec((2,), np.int64), "b": TensorSpec((), np.int64)}
    wrong = Dataset.range(3).map(
        lambda x: {"a": np.zeros(3, np.int64), "b": x}, output_signature=signature
    )
    with pytest.raises(InvalidArgumentError, match=r"\['a'\]"):
        list(service.whole(wrong))


@pytest.mark.shares_cluster
@pytest.mark.parametrize("options", [{}, {"delivery": "exactly_once"}, {"ordered": True}], ids=str)
@pytest.mark.parametrize("size", [1, 1 << 15], ids=["small", "large"])
def test_undeclared_shape_costs_one_element(
    service: Service, options: dict[str, Any], size: int
) -> None:
    def grows(x: Any) -> Any:
        return np.zeros(size + int(x == 400), np.int64)

    wrong = Dataset.range(500).map(grows, output_signature=TensorSpec((size,), np.int64))
    found: list[tuple[int, ...]] = []
    problems: list[str] = []
    with iter(service.dealt(wrong, **options)) as iterator:
        for _ in range(2):
            try:
                found.extend(each.shape for each in iterator)
            except InvalidArgumentError as problem:
                problems.append(str(problem))
    assert len(problems) == 1
    assert f"({size + 1},)" in problems[0]
    assert found == [(size,)] * 499


@pytest.mark.shares_cluster
@pytest.mark.parametrize(
    "raised",
    [ValueError("bad row"), UnavailableError(None, None, "bad row"), SystemExit("bad row")],
)
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"num_consumers": 1, "consumer_index": 0}, "element 3 of dataset"),
        ({"cross_trainer_cache": CrossTrainerCache("one")}, "element 3 of dataset"),
        ({"delivery": "exactly_once"}, r"element \d+ of positions \d+ to \d+ of dataset"),
    ],
    ids=["rounds", "cache", "portions"],
)
def test_operator_is_named_in_all_kinds_of_reading(
    service: Service, options: dict[str, Any], place: str, raised: BaseException
) -> None:
    dataset = Dataset.range(1000).map(raises_at(3, raised))
    endless = dataset if "delivery" in options else dataset.repeat()
    read = service.dealt if "delivery" in options else service.whole
    with (
        pytest.raises(OpError, match=rf"bad row[^$]*map\(function=decode.*\), {place}") as caught,
        iter(read(endless, job_name=f"{uuid.uuid4()}", **options)) as iterator,
    ):
        [next(iterator) for _ in range(10)]
    assert not isinstance(caught.value, UnavailableError)


@pytest.mark.shares_cluster
def test_wrong_spec_of_registered_pipeline_is_error(service: Service) -> None:
    id = register_dataset(service.dispatcher.target, Dataset.range(3))
    read = from_dataset_id(
        "parallel_epochs", service.dispatcher.target, id, element_spec=TensorSpec((4,), np.float32)
    )
    with pytest.raises(InvalidArgumentError, match="element"):
        list(read)


@pytest.mark.shares_cluster
def test_missing_file_is_named(service: Service, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path in paths:
        path.write_text(f"{path.stem}\n")
    dataset = service.whole(TextLineDataset([str(path) for path in paths]))
    paths[1].unlink()
    found, problems = read_all(dataset)
    assert found == ["0", "2"]
    (problem,) = problems
    assert isinstance(problem, NotFoundError)
    assert str(paths[1]) in str(problem)


@pytest.mark.shares_cluster
def test_truncated_file_is_named(service: Service, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.bin" for number in range(3)]
    for path in paths:
        path.write_bytes(bytes(8))
    dataset = service.whole(FixedLengthRecordDataset([str(path) for path in paths], 4))
    paths[1].write_bytes(bytes(6))
    found, problems = read_all(dataset)
    (problem,) = problems
    assert isinstance(problem, (DataLossError, InvalidArgumentError))
    assert str(paths[1]) in str(problem)
    assert len(found) >= 4


@pytest.mark.shares_cluster
def test_unpicklable_pipeline_is_refused(service: Service) -> None:
    lock = threading.Lock()
    words = "Serialization error while trying to register a dataset with tf.data service"
    with pytest.raises(FailedPreconditionError, match=words) as caught:
        service.whole(Dataset.range(3).map(lambda x: (lock, x)[1]))
    assert caught.value.__cause__ is not None


def test_stuck_task_does_not_delay_others(tmp_path: Path) -> None:
    """Six workers, one of which never gives anything, one element outstanding."""
    with serving(workers=6, processes=False) as service:
        stuck, over = tmp_path / "stuck", tmp_path / "over"

        def first_hangs(x: Any) -> Any:
            try:
                stuck.touch(exist_ok=False)
            except FileExistsError:
                return x
            while not over.exists():
                time.sleep(0.01)
            return x

        dataset = Dataset.range(1).repeat().map(lambda x: x + 1).apply(_each(first_hangs))
        read = dataset.apply(
            distribute(ShardingPolicy.OFF, service.dispatcher.target, max_outstanding_requests=1)
        )
        try:
            with iter(read) as iterator:
                assert [int(next(iterator)) for _ in range(100)] == [1] * 100
        finally:
            over.touch()


def _each(function: Callable[[Any], Any]) -> Callable[[Dataset], Dataset]:
    return lambda dataset: dataset.map(function)


def test_stuck_process_ends_with_worker(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def hangs(x: Any) -> Any:
        if x > 0:
            begun.touch()
            time.sleep(1000)
        return x

    with serving() as service:
        (worker,) = service.workers
        with iter(service.dealt(Dataset.range(10).map(hangs))) as iterator:
            assert int(next(iterator)) == 0
            until(begun.exists, "the user's function")
            worker.stop(grace_s=0.1)
            assert worker.join(0)


READINGS: list[dict[str, Any]] = [
    {"delivery": "exactly_once"},
    {"ordered": True},
    {"num_consumers": 1, "consumer_index": 0},
    {"cross_trainer_cache": CrossTrainerCache("a")},
]


@pytest.mark.shares_cluster
@pytest.mark.parametrize("options", READINGS, ids=lambda each: next(iter(each)))
def test_errors_end_all_kinds_of_reading(service: Service, options: dict[str, Any]) -> None:
    away = raises_at(3, UnavailableError(None, None, "the database is away"))
    if "delivery" in options or "ordered" in options:
        dataset = service.dealt(Dataset.range(10).map(away), **options)
    else:
        dataset = service.whole(
            Dataset.counter().map(away), job_name=f"{options} {id(service)}", **options
        )
    with iter(dataset) as iterator, pytest.raises(UnknownError) as raised:
        list(iterator)
    text = str(raised.value)
    for part in (
        "UnavailableError: the database is away",
        "map(function=decode",
        "element ",
        "of dataset",
        "job ",
    ):
        assert part in text
    assert service.workers[0].advertised_address in text
