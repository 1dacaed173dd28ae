"""Reading snapshots: whole ones, those that are being written, those that failed."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.data.service.snapshots.helpers import always, begin, numbers, save, write, writing
from tests.data.service.snapshots.test_writer import fails_at_five
from zmqdist import TensorSpec
from zmqdist.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset, snapshot_layout
from zmqdist.data.dataset import deserialize
from zmqdist.data.ops import saving, snapshots
from zmqdist.data.service.snapshots import writer
from zmqdist.data.splits import open_split, split_providers
from zmqdist.errors import DataLossError, InvalidArgumentError, NotFoundError


def in_order(chunks: Dataset) -> Dataset:
    """One chunk after the other."""
    return chunks.flat_map(lambda chunk: chunk)


def load(path: Path, **options: Any) -> list[Any]:
    return sorted(numbers(Dataset.load(str(path), **options)))


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "WAIT_S", 0.1)
    monkeypatch.setattr(snapshots, "POLL_S", (0.001, 0.01))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 10])
@pytest.mark.parametrize("chunk", [1, 16 * 1024])
def test_save_load(tmp_path: Path, workers: int, count: int, chunk: int) -> None:
    save(Dataset.range(count), tmp_path / "s", workers, chunk_bytes_max=chunk)
    assert load(tmp_path / "s", wait=True) == list(range(count))


@pytest.mark.parametrize("compression", ["AUTO", "GZIP", "SNAPPY", "ZLIB", None])
def test_compression(tmp_path: Path, compression: str | None) -> None:
    dataset = Dataset.range(50).map(lambda x: {"x": np.full(20, x), "t": "text" * int(x)})
    save(dataset, tmp_path / "s", compression=compression, chunk_bytes_max=1000)
    for told in (compression, None):
        found = Dataset.load(str(tmp_path / "s"), compression=told, reader_func=in_order)
        assert [(int(one["x"][0]), one["t"]) for one in found] == [
            (x, "text" * x) for x in range(50)
        ]


@pytest.mark.parametrize("repetitions", [1, 10])
@pytest.mark.parametrize("workers", [1, 3])
def test_repeated_dataset(tmp_path: Path, repetitions: int, workers: int) -> None:
    save(Dataset.range(1000).repeat(repetitions), tmp_path / "s", workers, chunk_bytes_max=5000)
    assert load(tmp_path / "s") == sorted(list(range(1000)) * repetitions)


@pytest.mark.parametrize("workers", [1, 3])
def test_imbalanced_zip_and_repeat(tmp_path: Path, workers: int) -> None:
    dataset = Dataset.zip(Dataset.range(200), Dataset.range(1000)).repeat(3)
    save(dataset, tmp_path / "s", workers)
    found = [tuple(map(int, pair)) for pair in Dataset.load(str(tmp_path / "s"))]
    assert sorted(one for one, _ in found) == sorted(list(range(200)) * 3)
    if workers == 1:
        assert sorted(found) == sorted((x, x) for x in list(range(200)) * 3)


def test_write_multiple_datasets(tmp_path: Path) -> None:
    for number in range(3):
        save(Dataset.range(number * 10, number * 10 + 10), tmp_path / str(number))
    assert [load(tmp_path / str(number))[0] for number in range(3)] == [0, 10, 20]


@pytest.mark.parametrize("chunk", [1, 100])
def test_load_with_custom_reader_func(tmp_path: Path, chunk: int) -> None:
    save(Dataset.range(50), tmp_path / "s", 2, chunk_bytes_max=chunk)
    read = load(
        tmp_path / "s",
        reader_func=lambda chunks: chunks.interleave(lambda one: one, cycle_length=3),
    )
    assert read == list(range(50))


def test_passes_can_shuffle_chunks(tmp_path: Path) -> None:
    save(Dataset.range(50), tmp_path / "s", chunk_bytes_max=8)
    dataset = Dataset.load(
        str(tmp_path / "s"), reader_func=lambda chunks: in_order(chunks.shuffle(50))
    )
    first, second = numbers(dataset), numbers(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))


def test_passes_have_same_order(tmp_path: Path) -> None:
    save(Dataset.range(100), tmp_path / "s", 3, chunk_bytes_max=80)
    passes = [numbers(Dataset.load(str(tmp_path / "s"))) for _ in range(3)]
    assert passes[0] == passes[1] == passes[2]


def test_chunks_come_by_index_and_then_by_stream(tmp_path: Path) -> None:
    save(Dataset.range(100), tmp_path / "s", 3, chunk_bytes_max=80)
    names: list[str] = []
    Dataset.load(
        str(tmp_path / "s"), reader_func=lambda chunks: names.extend(_names(chunks)) or chunks
    )
    found = [snapshot_layout.CommittedChunk.of(name) for name in names]
    assert found == sorted(found) == snapshot_layout.committed_chunks(str(tmp_path / "s"))  # type: ignore[type-var]


def _names(chunks: Dataset) -> list[str]:
    (paths,) = chunks.inputs
    return [os.path.basename(str(path)) for path in paths]


@pytest.mark.parametrize(("repetitions", "wanted"), [(1, 5), (2, 10), (None, INFINITE_CARDINALITY)])
def test_cardinality_is_known_when_complete(
    tmp_path: Path, repetitions: int | None, wanted: int
) -> None:
    counts: list[int] = []

    def count(chunks: Dataset) -> Dataset:
        counts.append(chunks.repeat(repetitions).cardinality())
        return in_order(chunks)

    snapshot = begin(tmp_path / "s", Dataset.range(5))
    Dataset.load(str(tmp_path / "s"), reader_func=count)
    write(snapshot, chunk_bytes_max=8)
    Dataset.load(str(tmp_path / "s"), reader_func=count)
    assert counts == [INFINITE_CARDINALITY if repetitions is None else UNKNOWN_CARDINALITY, wanted]


def test_enumerate(tmp_path: Path) -> None:
    save(Dataset.range(9).map(lambda x: x * 2), tmp_path / "s", chunk_bytes_max=16)
    found = [tuple(map(int, pair)) for pair in Dataset.load(str(tmp_path / "s")).enumerate()]
    assert [index for index, _ in found] == list(range(9))
    assert sorted(value for _, value in found) == list(range(0, 18, 2))


# -- while it is being written ---------------------------------------------------------------------


def test_committed_chunks_can_be_read_early(tmp_path: Path) -> None:
    """The writer waits for its reader: elements come before the snapshot is whole."""
    go_on = threading.Semaphore(20)
    read: list[int] = []

    def slowly(x: Any) -> Any:
        assert go_on.acquire(timeout=30)
        return x

    snapshot = begin(tmp_path / "s", Dataset.range(60))
    with _mapped(slowly), writing(snapshot, 1, chunk_bytes_max=8, interval_s=always):
        for x in Dataset.load(str(tmp_path / "s"), wait=True):
            read.append(int(x))
            go_on.release()
    assert read == list(range(60))


def _mapped(function: Any) -> Any:
    """The pipeline that a writer opens, behind a function that waits for this very test and so
    cannot be pickled."""
    return mock.patch.object(writer, "deserialize", lambda text: deserialize(text).map(function))


def test_load_begins_before_save(tmp_path: Path) -> None:
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(load(tmp_path / "s", wait=True)))
    reader.start()
    save(Dataset.range(10), tmp_path / "s", 2)
    reader.join(30)
    assert found == list(range(10))


def test_choose_from_datasets_that_are_being_written(tmp_path: Path) -> None:
    words = [[*"abc"][number] for number in range(3)]
    parts = [begin(tmp_path / word, Dataset.from_tensors(word).repeat(5)) for word in words]
    loaded = [Dataset.load(str(tmp_path / word), wait=True) for word in words]
    chosen = Dataset.choose_from_datasets(loaded, Dataset.range(3).repeat(5))
    with writing(parts[0], 1), writing(parts[1], 1), writing(parts[2], 1):
        assert list(chosen) == words * 5


def test_choose_from_repeated_datasets(tmp_path: Path) -> None:
    for word, count in (("a", 5), ("b", 5), ("c", 10)):
        save(Dataset.from_tensors(word).repeat(count), tmp_path / word)
    loaded = [Dataset.load(str(tmp_path / word)) for word in "abc"]
    chosen = Dataset.choose_from_datasets(
        loaded, Dataset.range(3).repeat(10), stop_on_empty_dataset=False
    )
    assert list(chosen) == list("abc") * 5 + ["c"] * 5


def test_sample_before_and_after(tmp_path: Path) -> None:
    for number in range(2):
        save(
            Dataset.sample_from_datasets([Dataset.range(20), Dataset.range(20, 30)]),
            tmp_path / str(number),
        )
    assert load(tmp_path / "0") == list(range(30))
    both = Dataset.sample_from_datasets(
        [Dataset.load(str(tmp_path / str(number))) for number in range(2)]
    )
    assert sorted(numbers(both)) == sorted([*range(30)] * 2)


# -- states and splits -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("reader", [None, in_order])
def test_saved_state_gives_same_remainder(tmp_path: Path, place: int, reader: Any) -> None:
    save(Dataset.range(20), tmp_path / "s", 2, chunk_bytes_max=24)
    dataset = Dataset.load(str(tmp_path / "s"), reader_func=reader)
    first = iter(dataset)
    for _ in range(place):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = iter(deserialize(dataset.serialize()))
    second.load_state_dict(state)
    assert numbers(second) == numbers(first)


def test_state_of_unfinished_snapshot_continues(
    tmp_path: Path,
) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(20))
    dataset = Dataset.load(str(tmp_path / "s"))
    with writing(snapshot, 2, chunk_bytes_max=24, interval_s=always):
        iterator = iter(dataset)
        read = [int(next(iterator)) for _ in range(8)]
        state = iterator.state_dict()
        iterator.close()
    other = iter(dataset)
    other.load_state_dict(state)
    assert sorted(read + numbers(other)) == list(range(20))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("repetitions", [1, 5])
def test_chunks_are_dealt_out_one_by_one(tmp_path: Path, whole: bool, repetitions: int) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(20))
    if whole:
        write(snapshot, chunk_bytes_max=24)
    dataset = Dataset.load(str(tmp_path / "s")).repeat(repetitions)
    (provider,) = split_providers(dataset)
    assert provider.cardinality() == (7 * repetitions if whole else INFINITE_CARDINALITY)
    if not whole:
        write(snapshot, chunk_bytes_max=24)
    readers = [
        open_split(dataset, lambda source, repetition: provider.next(repetition)) for _ in range(2)
    ]
    found: list[int] = []
    while readers:
        reader = random.choice(readers)
        try:
            found.append(int(next(reader)))
        except StopIteration:
            readers.remove(reader)
    assert sorted(found) == sorted(list(range(20)) * repetitions)


def test_chunks_can_be_sharded(tmp_path: Path) -> None:
    save(Dataset.range(20), tmp_path / "s", chunk_bytes_max=8)
    dataset = Dataset.load(str(tmp_path / "s"))

    def divide(one: Dataset) -> Dataset:
        return Dataset(one.op, (one.inputs[0].shard(2, 1),)) if one.op.is_reader else one

    assert sorted(numbers(dataset.rewrite(divide))) == list(range(1, 20, 2))


# -- what is wrong ---------------------------------------------------------------------------------


def test_snapshot_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no saved dataset"):
        Dataset.load(str(tmp_path / "s"))


def test_failed_snapshot_is_not_loaded(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10).map(fails_at_five))
    with pytest.raises(InvalidArgumentError):
        write(snapshot)
    with pytest.raises(ValueError, match=r"element is NaN.*The save job failed to write it\."):
        Dataset.load(str(tmp_path / "s"))


def test_failure_during_load_has_error_of_writer(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10).map(fails_at_five))
    dataset = Dataset.load(str(tmp_path / "s"))
    with writing(snapshot, 1), pytest.raises(InvalidArgumentError, match="element is NaN"):
        list(dataset)


def test_bad_element_spec_and_bad_compression(tmp_path: Path) -> None:
    save(Dataset.range(10), tmp_path / "s")
    with pytest.raises(
        ValueError, match=r"User specified element_spec .*, but the actual element_spec is"
    ):
        Dataset.load(str(tmp_path / "s"), element_spec=TensorSpec((), np.float32))
    with pytest.raises(
        ValueError, match="User specified compression ZLIB, but the actual compression is SNAPPY"
    ):
        Dataset.load(str(tmp_path / "s"), compression="ZLIB")
    with pytest.raises(ValueError, match="Invalid `compression` argument"):
        Dataset.load(str(tmp_path / "s"), compression="LZMA")


@pytest.mark.parametrize("content", [None, ""])
def test_spec_file_is_optional(tmp_path: Path, content: str | None) -> None:
    save(Dataset.range(10), tmp_path / "s")
    file = tmp_path / "s" / "dataset_spec.json"
    assert json.loads(file.read_text()) == {"shape": [], "dtype": "<i8"}
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert load(tmp_path / "s") == list(range(10))


def test_missing_chunk_is_data_loss(tmp_path: Path) -> None:
    save(Dataset.range(10), tmp_path / "s", chunk_bytes_max=8)
    (tmp_path / "s" / "chunks" / "chunk_0_3_1").unlink()
    with pytest.raises(DataLossError, match="lost chunk 3 of stream 0"):
        list(Dataset.load(str(tmp_path / "s"), reader_func=in_order))


def test_snapshot_at_url(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    save(Dataset.range(50), f"file://{tmp_path}/s", 2, chunk_bytes_max=24, interval_s=always)
    assert load(f"file://{tmp_path}/s") == list(range(50))  # type: ignore[arg-type]
    assert load(tmp_path / "s") == list(range(50))
