"""Reading and writing files: what is in them, what is wrong with them, what was saved."""

from __future__ import annotations

import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.examples import files, record
from tests.data.helpers import plain
from zmqdist import TensorSpec
from zmqdist.data import (
    AUTOTUNE,
    Dataset,
    FixedLengthRecordDataset,
    TextLineDataset,
    TFRecordDataset,
)
from zmqdist.data.ops import saving
from zmqdist.data.splits import split_providers
from zmqdist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
)


def numbers(dataset: Any) -> list[Any]:
    return [np.asarray(x).tolist() for x in dataset]


def test_lines_are_str_in_file_order(tmp_path: Path) -> None:
    names = files(tmp_path, b"one\ntwo\r\n", b"\xffthree")
    assert list(TextLineDataset(names)) == ["one", "two", "\udcffthree"]
    assert list(TextLineDataset(names[0])) == ["one", "two"]
    assert list(TextLineDataset(Dataset.list_files(str(tmp_path / "*"), shuffle=False))) == list(
        TextLineDataset(names)
    )
    assert list(TextLineDataset(files(tmp_path, zlib.compress(b"a\nb")), "ZLIB")) == ["a", "b"]


def test_missing_file_costs_only_itself(tmp_path: Path) -> None:
    names = [*files(tmp_path, b"one"), str(tmp_path / "none"), *files(tmp_path, b"one")]
    with pytest.raises(NotFoundError, match="none"):
        list(TextLineDataset(names))
    assert list(TextLineDataset(names).ignore_errors()) == ["one", "one"]


def test_fixed_length_records(tmp_path: Path) -> None:
    names = files(tmp_path, b"hAABBff", b"hCCff")
    assert list(FixedLengthRecordDataset(names, 2, 1, 2)) == [b"AA", b"BB", b"CC"]
    with pytest.raises(InvalidArgumentError, match="no multiple of 4 bytes"):
        list(FixedLengthRecordDataset(names, 4, 1, 2))
    with pytest.raises(InvalidArgumentError, match="record_bytes"):
        FixedLengthRecordDataset(names, 0)
    with pytest.raises(InvalidArgumentError, match="footer_bytes must be >= 0, not -1"):
        FixedLengthRecordDataset(names, 2, 1, -1)


def test_missing_google_crc32c_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(
        ImportError, match=r"TFRecordDataset needs google-crc32c: pip install google-crc32c"
    ):
        TFRecordDataset("x")


@pytest.mark.parametrize("parallel", [1, 2, AUTOTUNE])
def test_parallel_files_yield_records_in_turn(tmp_path: Path, parallel: int) -> None:
    names = files(tmp_path, b"a1\na2\na3", b"b1", b"c1\nc2")
    dataset = TextLineDataset(names, num_parallel_reads=parallel)
    found = list(dataset)
    assert sorted(found) == ["a1", "a2", "a3", "b1", "c1", "c2"]
    if parallel == 2:
        assert found == ["a1", "b1", "a2", "a3", "c1", "c2"]
    assert (dataset.op.is_reader, dataset.element_spec) == (True, TensorSpec((), np.str_))
    assert list(
        TextLineDataset([names[0], str(tmp_path / "none")], num_parallel_reads=2).ignore_errors()
    ) == list(TextLineDataset(names[0]))


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        (record(b"one")[:-1], "truncated"),
        (record(b"one")[:5], "truncated"),
        (b"\1" + record(b"one")[1:], "corrupted"),
        (record(b"one").replace(b"one", b"ome"), "corrupted"),
    ],
)
def test_damaged_record_is_data_loss(tmp_path: Path, damaged: bytes, text: str) -> None:
    names = files(tmp_path, record(b"first") + damaged, record(b"other"))
    with pytest.raises(DataLossError, match=text):
        list(TFRecordDataset(names))
    assert list(TFRecordDataset(names).ignore_errors()) == [b"first", b"other"]


def test_file_readers_are_found_and_sharded(tmp_path: Path) -> None:
    dataset = TextLineDataset(files(tmp_path, b"a", b"b", b"c")).map(str.upper)

    def divide(one: Dataset) -> Dataset:
        return Dataset(one.op, (one.inputs[0].shard(2, 1),)) if one.op.is_reader else one

    assert list(dataset.rewrite(divide)) == ["B"]
    assert list(dataset) == ["A", "B", "C"]
    assert dataset.rewrite(lambda one: one) is dataset


def test_saved_dataset_keeps_spec_and_length(tmp_path: Path) -> None:
    dataset = Dataset.range(5).map(lambda x: {"x": np.full(2, x), "t": str(int(x))})
    dataset.save(str(tmp_path))
    loaded = Dataset.load(str(tmp_path))
    assert list(map(plain, loaded)) == list(map(plain, dataset))
    assert loaded.element_spec == dataset.element_spec
    assert loaded.cardinality() == 5


def test_load_prefers_newest_run(tmp_path: Path) -> None:
    Dataset.range(3).save(str(tmp_path))
    old = iter(Dataset.load(str(tmp_path)))
    assert next(old) == 0
    Dataset.range(10, 12).save(str(tmp_path))
    assert numbers(Dataset.load(str(tmp_path))) == [10, 11]
    assert numbers(old) == [1, 2]


def test_shard_func_and_reader_func(tmp_path: Path) -> None:
    Dataset.range(6).save(str(tmp_path), shard_func=lambda x: x % 2)
    assert numbers(Dataset.load(str(tmp_path))) == [0, 2, 4, 1, 3, 5]
    joined = Dataset.load(
        str(tmp_path), reader_func=lambda parts: parts.interleave(lambda part: part, cycle_length=2)
    )
    assert numbers(joined) == [0, 1, 2, 3, 4, 5]


def test_empty_dataset_is_saved(tmp_path: Path) -> None:
    Dataset.range(0).save(str(tmp_path))
    assert numbers(Dataset.load(str(tmp_path))) == []


def test_load_and_save_refuse_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no saved dataset"):
        Dataset.load(str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="infinite"):
        Dataset.range(3).repeat().save(str(tmp_path))
    with pytest.raises(ValueError, match="compression"):
        Dataset.range(3).save(str(tmp_path), compression="BEST")
    with pytest.raises(ValueError, match="checkpoint_args has a `directory`"):
        Dataset.range(3).save(str(tmp_path), checkpoint_args={})
    with pytest.raises(ValueError, match="`checkpoint_interval` must be > 0"):
        Dataset.range(3).save(
            str(tmp_path), checkpoint_args={"directory": tmp_path, "checkpoint_interval": 0}
        )
    Dataset.range(3).save(str(tmp_path), compression="GZIP")
    assert numbers(Dataset.load(str(tmp_path), compression="GZIP")) == [0, 1, 2]
    with pytest.raises(DataLossError, match="but the actual compression is GZIP"):
        Dataset.load(str(tmp_path), compression="ZLIB")
    with pytest.raises(ValueError, match="but the actual element_spec is"):
        Dataset.load(str(tmp_path), element_spec=TensorSpec((), np.float32))


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
@pytest.mark.parametrize("failing", [0, 3, 4, 5, 9])
def test_interrupted_save_continues(tmp_path: Path, compression: str | None, failing: int) -> None:
    log = tmp_path / "log"
    seen = tmp_path / "seen"

    def counted(x: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{x} ")
        if x == failing and not seen.exists():
            seen.touch()
            raise KeyboardInterrupt
        return x

    dataset = Dataset.range(10).map(counted, output_signature=TensorSpec((), np.int64))
    kept = {"directory": tmp_path / "place", "checkpoint_interval": 2}

    def save() -> None:
        dataset.save(str(tmp_path / "saved"), compression, lambda x: x % 3, kept)

    with pytest.raises(KeyboardInterrupt):
        save()
    with pytest.raises(NotFoundError):
        Dataset.load(str(tmp_path / "saved"))
    save()
    loaded = Dataset.load(str(tmp_path / "saved"))
    assert sorted(numbers(loaded)) == list(range(10))
    assert loaded.cardinality() == 10
    again = [int(x) for x in log.read_text().split()][failing + 1 :]
    assert again == list(range(failing - failing % 2, 10)), (
        "only what came behind the last checkpoint is computed again"
    )
    assert list((tmp_path / "place").iterdir()) == []
    save()  # anew
    assert len(list((tmp_path / "saved").iterdir())) == 3


def test_checkpoint_of_other_save_is_refused(tmp_path: Path) -> None:
    kept = {"directory": tmp_path / "place", "checkpoint_interval": 1}
    with pytest.raises(ZeroDivisionError):
        Dataset.range(-1, 3).map(lambda x: 6 // int(x)).save(
            str(tmp_path / "saved"), checkpoint_args=kept
        )
    with pytest.raises(FailedPreconditionError, match="another dataset or to another folder"):
        Dataset.range(3).save(str(tmp_path / "saved"), checkpoint_args=kept)


def test_load_waits_for_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "WAIT_S", 0.01)
    writer = threading.Timer(0.05, Dataset.range(3).save, [str(tmp_path)])
    writer.start()
    assert numbers(Dataset.load(str(tmp_path), wait=True)) == [0, 1, 2]
    writer.join()


def test_snapshot_computes_once_per_pipeline(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def counted(x: Any) -> Any:
        with calls.open("a") as file:
            file.write("x")
        return x

    dataset = (
        Dataset.range(3)
        .map(counted, output_signature=TensorSpec((), np.int64))
        .snapshot(str(tmp_path / "kept"))
    )
    partial = iter(dataset)
    next(partial)
    partial.close()
    assert numbers(dataset) == numbers(dataset) == [0, 1, 2]
    assert calls.read_text() == "x" * 4
    assert numbers(Dataset.range(2).snapshot(str(tmp_path / "kept"))) == [0, 1]
    assert len(list((tmp_path / "kept").iterdir())) == 2
    with pytest.raises(UnimplementedError, match="Splitting is not implemented for snapshot"):
        split_providers(dataset)
