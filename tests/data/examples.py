"""An example of each operator: what the conformance test reads. A new operator needs one here."""

from __future__ import annotations

import gzip
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.service.snapshots.helpers import save as write_snapshot
from zmqdist.data import (
    AUTOTUNE,
    Dataset,
    FixedLengthRecordDataset,
    Options,
    ParquetDataset,
    Sparse,
    TextLineDataset,
    TFRecordDataset,
)
from zmqdist.data.experimental import assert_cardinality
from zmqdist.data.interfaces import make
from zmqdist.data.ops.csv_rows import CsvRows
from zmqdist.data.ops.elementwise import ShardOp
from zmqdist.data.ops.snapshots import ChunkFiles, Chunks
from zmqdist.data.ops.sources import Elements
from zmqdist.data.structure import spec_of
from zmqdist.specs import TensorSpec

CSV = b'a,1\n\n"b, ""c""",2\n'


@dataclass(frozen=True)
class Example:
    """How to build a dataset whose last operator is the one to be tried.

    Attributes:
      repeats: whether each iterator over one object gives the same elements.
    """

    build: Callable[[Path], Dataset]
    repeats: bool = True


def slices() -> Dataset:
    return Dataset.from_tensor_slices(
        {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "y": np.array(["a", "bc", ""])}
    )


def set_options(options: Options) -> Options:
    options.deterministic = True
    return options


def gathered(*elements: Any) -> Dataset:
    """What an operator makes of elements that it has gathered."""
    return make(Elements(elements, spec_of(elements[0])))


def choices(*numbers: int) -> Dataset:
    return Dataset.from_tensor_slices(np.array(numbers, np.int64))


def arrays(count: int = 4) -> Dataset:
    """Small arrays that a reader can write into."""
    return Dataset.range(count).map(lambda x: np.full(2, x + 5))


class ArraySource:
    """An iterable that yields the same arrays each time."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arrays)


def rows_of_sparse() -> Dataset:
    return Dataset.range(1, 4).map(lambda n: Sparse.of(np.eye(3) * n))


def lengths() -> Dataset:
    """Arrays of different lengths."""
    return Dataset.range(1, 7).map(
        lambda n: np.arange(n), output_signature=TensorSpec((None,), np.int64)
    )


def cache_path(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(folder / "kept")


def files(folder: Path, *contents: bytes) -> list[str]:
    folder.mkdir(exist_ok=True)
    for number, content in enumerate(contents):
        (folder / f"file-{number}").write_bytes(content)
    return [str(folder / f"file-{number}") for number in range(len(contents))]


def masked_crc32c(data: bytes) -> int:
    """The checksum of a TFRecord, bit by bit as its definition has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return (
        head
        + struct.pack("<I", masked_crc32c(head))
        + data
        + struct.pack("<I", masked_crc32c(data))
    )


def tables(folder: Path) -> list[str]:
    """Two Parquet files, of two row groups and one."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(exist_ok=True)
    names = [str(folder / f"table-{number}") for number in range(2)]
    for name, count in zip(names, (5, 2), strict=True):
        columns = {
            "n": np.arange(count),
            "x": np.arange(count) / 2,
            "t": [str(n) for n in range(count)],
        }
        columns |= {
            "v": [[n, n + 1] for n in range(count)],
            "b": [bytes([n, 1]) for n in range(count)],
        }
        parquet.write_table(pyarrow.table(columns), name, row_group_size=3)
    return names


def saved(
    folder: Path, dataset: Dataset, compression: str | None = None, shard_func: Any = None
) -> Dataset:
    if not folder.exists() or not any(folder.iterdir()):
        dataset.save(str(folder), compression, shard_func)
    return Dataset.load(str(folder))


@cache
def chunked() -> str:
    """The folder of a snapshot, always the same: the names of its chunks are elements."""
    folder = tempfile.TemporaryDirectory()
    chunked.folder = folder  # type: ignore[attr-defined]
    write_snapshot(slices().repeat(3), f"{folder.name}/s", 2, chunk_bytes_max=20)
    return f"{folder.name}/s"


def generated(count: int) -> Any:
    return (index * 2 for index in range(count))


EXAMPLES: dict[str, list[Example]] = {
    "range": [
        Example(lambda _: Dataset.range(5)),
        Example(lambda _: Dataset.range(10, 0, -3)),
        Example(lambda _: Dataset.range(0.0, 1.0, 0.25, output_type=np.float32)),
        Example(lambda _: Dataset.range(0)),
    ],
    "counter": [Example(lambda _: Dataset.counter(3, 2))],
    "from_tensors": [
        Example(lambda _: Dataset.from_tensors((np.ones(3), "text", 7))),
        Example(lambda _: Dataset.from_tensors({"x": np.ones(3), "y": (np.zeros(2),)})),
    ],
    "from_tensor_slices": [
        Example(lambda _: slices()),
        Example(lambda _: Dataset.from_tensor_slices([b"ab", b"c"])),
    ],
    "elements": [
        Example(lambda _: gathered((np.int64(1), "a"), (np.int64(2), "bc"))),
        Example(lambda _: gathered({"x": np.ones(2)}, {"x": np.zeros(2)})),
    ],
    "from_generator": [
        Example(lambda _: Dataset.from_generator(generated, args=(4,))),
        Example(lambda _: Dataset.from_source({1, 2, 3})),
        Example(lambda _: Dataset.from_source(ArraySource(np.ones(2), np.zeros(2)))),
    ],
    "random": [
        Example(lambda _: Dataset.random(seed=1)),
        Example(lambda _: Dataset.random(1, True), repeats=False),
    ],
    "map": [
        Example(lambda _: Dataset.range(5).map(lambda x: (x, x * 0.5))),
        Example(lambda _: slices().map(lambda row: row["x"].sum())),
        Example(lambda _: Dataset.range(9).map(lambda x: 12 // int(x - 4), num_parallel_calls=3)),
    ],
    "scan": [
        Example(
            lambda _: Dataset.range(5).scan(np.int64(0), lambda state, x: (state + x, state * 2))
        ),
        Example(lambda _: arrays().scan(np.ones(2), lambda state, x: (state + x,) * 2)),
        Example(lambda _: arrays().scan({"n": np.ones(2)}, lambda state, x: (state, state))),
    ],
    "enumerate": [Example(lambda _: slices().enumerate(start=7))],
    "options": [Example(lambda _: Dataset.range(3).with_options(set_options(Options())))],
    "filter": [Example(lambda _: Dataset.range(10).filter(lambda x: x % 3 == 0))],
    "take": [
        Example(lambda _: Dataset.counter().take(4)),
        Example(lambda _: Dataset.range(4).take(-1)),
    ],
    "assert_cardinality": [
        Example(lambda _: Dataset.range(4).filter(lambda x: x > 1).apply(assert_cardinality(2))),
        Example(lambda _: arrays().apply(assert_cardinality(4))),
    ],
    "skip": [
        Example(lambda _: Dataset.range(6).skip(4)),
        Example(lambda _: Dataset.range(6).skip(-1)),
    ],
    "shard": [
        Example(lambda _: Dataset.range(10).shard(4, 1)),
        Example(lambda _: make(ShardOp(4, 1, full=True), [Dataset.range(10)])),
    ],
    "take_while": [Example(lambda _: Dataset.range(10).take_while(lambda x: x < 4))],
    "unique": [Example(lambda _: Dataset.from_tensor_slices([3, 1, 3, 2, 1]).unique())],
    "ignore_errors": [
        Example(lambda _: Dataset.range(-2, 3).map(lambda x: 12 // int(x)).ignore_errors())
    ],
    "batch": [
        Example(lambda _: slices().batch(2)),
        Example(lambda _: Dataset.range(7).batch(3, drop_remainder=True)),
        Example(lambda _: Dataset.range(7).batch(2, num_parallel_calls=2)),
    ],
    "unbatch": [
        Example(lambda _: slices().batch(2).unbatch()),
        Example(lambda _: arrays().batch(2).unbatch()),
        Example(lambda _: rows_of_sparse().batch(2).unbatch()),
    ],
    "rebatch": [Example(lambda _: Dataset.range(10).batch(4).rebatch([1, 3]))],
    "shuffle": [
        Example(lambda _: Dataset.range(9).shuffle(4, seed=5), repeats=False),
        Example(lambda _: Dataset.range(9).shuffle(20, seed=5, reshuffle_each_iteration=False)),
        Example(lambda _: Dataset.range(9).shuffle(-2, seed=5), repeats=False),
    ],
    "repeat": [
        Example(lambda _: Dataset.range(3).repeat(3)),
        Example(lambda _: Dataset.range(3).repeat()),
        Example(lambda _: Dataset.from_tensors({"x": np.ones(3)}).repeat(3)),
        Example(lambda _: Dataset.range(4).shuffle(4, seed=2).repeat(2), repeats=False),
    ],
    "zip": [
        Example(lambda _: Dataset.zip(Dataset.range(4), slices())),
        Example(lambda _: Dataset.zip({"a": slices()})),
        Example(
            lambda _: Dataset.zip(
                {"a": Dataset.range(4), "b": (Dataset.range(2), Dataset.range(9))}
            )
        ),
    ],
    "concatenate": [Example(lambda _: Dataset.range(3).concatenate(Dataset.range(10, 12)))],
    "interleave": [
        Example(lambda _: Dataset.range(4).flat_map(lambda x: Dataset.range(x))),
        Example(
            lambda _: Dataset.range(2, 6).interleave(lambda x: Dataset.range(x * 10, x * 11), 2, 3)
        ),
        Example(
            lambda _: Dataset.range(2, 6).interleave(
                lambda x: Dataset.range(x * 10, x * 11), 2, num_parallel_calls=AUTOTUNE
            )
        ),
        Example(lambda _: Dataset.range(2).flat_map(lambda _: Dataset.range(5).shuffle(5, seed=3))),
    ],
    "choose_from_datasets": [
        Example(
            lambda _: Dataset.choose_from_datasets(
                [Dataset.range(3), Dataset.range(9)], choices(0, 1, 1, 0, 1)
            )
        ),
        Example(
            lambda _: Dataset.choose_from_datasets(
                [Dataset.range(1), Dataset.range(9)], choices(0, 1, 0, 1), False
            )
        ),
        Example(
            lambda _: Dataset.sample_from_datasets(
                [Dataset.range(5), Dataset.range(10, 13)], [0.7, 0.3], seed=1
            )
        ),
        Example(
            lambda _: Dataset.sample_from_datasets(
                [Dataset.range(5), Dataset.range(10, 15)], seed=1, rerandomize_each_iteration=True
            ),
            repeats=False,
        ),
    ],
    "selector": [
        Example(
            lambda _: Dataset.sample_from_datasets(
                [Dataset.range(9)] * 3, [0.2, 0.3, 0.5], 7
            ).inputs[0]
        )
    ],
    "prefetch": [
        Example(lambda _: Dataset.range(7).prefetch(2)),
        Example(lambda _: Dataset.range(-2, 2).map(lambda x: 12 // int(x)).prefetch(AUTOTUNE)),
        Example(lambda _: Dataset.range(3).prefetch(0)),
    ],
    "window": [
        Example(lambda _: Dataset.range(7).window(3)),
        Example(lambda _: Dataset.range(7).window(2, 1, 2, drop_remainder=True)),
        Example(lambda _: Dataset.range(9).window(2, 4)),
        Example(lambda _: slices().window(2)),
        Example(lambda _: arrays().window(2, 1)),
    ],
    "group_by_window": [
        Example(
            lambda _: Dataset.range(11).group_by_window(
                lambda x: x % 3, lambda key, rows: rows.batch(2), 3
            )
        ),
        Example(
            lambda _: lengths().bucket_by_sequence_length(len, [3, 5], [2, 3, 1], padding_values=-1)
        ),
    ],
    "padded_batch": [
        Example(lambda _: lengths().padded_batch(2)),
        Example(
            lambda _: (
                lengths().map(lambda x: {"x": x, "n": len(x)}).padded_batch(2, {"x": [7], "n": []})
            )
        ),
    ],
    "ragged_batch": [
        Example(lambda _: lengths().ragged_batch(2)),
        Example(lambda _: lengths().ragged_batch(4, True)),
    ],
    "sparse_batch": [
        Example(lambda _: lengths().map(lambda x: x).sparse_batch(2, [None])),
        Example(lambda _: Dataset.range(5).sparse_batch(2, [])),
    ],
    "cache": [
        Example(lambda _: Dataset.range(5).cache()),
        Example(lambda _: Dataset.range(6).shuffle(6, seed=1).cache()),
        Example(lambda _: arrays().cache()),
        Example(lambda _: arrays().map(lambda x: (x, {"x": x})).cache()),
    ],
    "cache_file": [
        Example(lambda folder: slices().cache(cache_path(folder))),
        Example(lambda folder: arrays().cache(cache_path(folder))),
    ],
    "text_lines": [
        Example(
            lambda folder: TextLineDataset(files(folder, b"one\ntwo", b"", b"three\r\n\nfour\n"))
        ),
        Example(lambda folder: TextLineDataset(files(folder, gzip.compress(b"one\ntwo")), "GZIP")),
    ],
    "fixed_length_records": [
        Example(
            lambda folder: FixedLengthRecordDataset(
                files(folder, b"aabb", b"cc"), 2, num_parallel_reads=2
            )
        ),
        Example(lambda folder: FixedLengthRecordDataset(files(folder, b"hhAABBCCf"), 2, 2, 1)),
    ],
    "tf_records": [
        Example(
            lambda folder: TFRecordDataset(
                files(folder, record(b"one") + record(b""), record(b"two"))
            )
        )
    ],
    "csv_rows": [
        Example(lambda folder: make(CsvRows(), [Dataset.from_tensor_slices(files(folder, CSV))])),
    ],
    "parquet": [
        Example(lambda folder: ParquetDataset(tables(folder), ["n", "t"])),
        Example(lambda folder: ParquetDataset(tables(folder), batch_size=2)),
        Example(lambda folder: ParquetDataset(Dataset.from_tensor_slices(tables(folder)))),
    ],
    "saved": [
        Example(lambda folder: saved(folder, slices())),
        Example(lambda folder: saved(folder, Dataset.range(7), "ZLIB", lambda x: x % 3)),
    ],
    "from_source": [
        Example(lambda _: Dataset.from_source([{"x": 1}, {"x": 2}, {"x": 3}])),
        Example(lambda _: Dataset.from_source([np.ones(2), np.ones(2)])),
    ],
    "rejection_resample": [
        Example(
            lambda _: Dataset.range(20).rejection_resample(
                lambda x: x % 2, [0.8, 0.2], [0.5, 0.5], 1
            ),
            repeats=False,
        ),
        Example(
            lambda _: Dataset.range(20).rejection_resample(lambda x: x % 2, [0.2, 0.8], seed=1),
            repeats=False,
        ),
    ],
    "chunk_files": [Example(lambda _: make(ChunkFiles(chunked())))],
    "chunks": [
        Example(
            lambda _, cycle=cycle: make(
                Chunks("SNAPPY", slices().element_spec, cycle), [make(ChunkFiles(chunked()))]
            )
        )
        for cycle in (1, 3)
    ],
    "snapshot": [
        Example(lambda folder: slices().snapshot(str(folder))),
        Example(lambda folder: arrays().snapshot(str(folder))),
    ],
}
