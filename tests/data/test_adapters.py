"""Elements from elsewhere: iterables, sources with positions, libraries; structures beside tuples
and dicts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest

from tests.data.examples import tables
from tests.data.helpers import plain
from zmqdist import TensorSpec
from zmqdist.data import Dataset, ParquetDataset, Ragged, Sparse
from zmqdist.data.iterators import load_elements, save_elements
from zmqdist.data.splits import open_split, split_providers
from zmqdist.errors import DataLossError, InvalidArgumentError, NotFoundError, UnimplementedError


def numbers(elements: Any) -> list[Any]:
    return [np.asarray(x).tolist() for x in elements]


class Squares:
    """A source with positions, as torch's map-style datasets and Grain's sources are."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, position: Any) -> Any:
        if position == 3:
            raise ValueError("three")
        return position**2, {"text": str(position)}


class Stateful:
    """An iterable whose iterators can tell their place; `read` are the items that were computed."""

    def __init__(self, count: int, names: tuple[str, str]) -> None:
        self.count, self.names = count, names
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        outer = self

        class ResumableIterator:
            at = 0

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> int:
                if self.at == outer.count:
                    raise StopIteration
                self.at += 1
                outer.read.append(self.at)
                return self.at

        def load(self: Any, place: Any) -> None:
            self.at = place["at"]

        setattr(ResumableIterator, self.names[0], lambda self: {"at": self.at})
        setattr(ResumableIterator, self.names[1], load)
        return ResumableIterator()


# -- iterables and sources -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", [[1, 2], (1, 2), range(1, 3), {1, 2}, {1: "a", 2: "b"}.keys(), np.array([1, 2])]
)
def test_rereadable_object_is_source(source: Any) -> None:
    dataset = Dataset.from_source(source)
    assert numbers(dataset) == numbers(dataset) == [1, 2]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (iter([1]), "only once"),
        ((x for x in [1]), "only once"),
        ({"x": [1]}, "from_tensor_slices"),
        (7, "neither"),
    ],
)
def test_wrong_source_is_refused_with_hint(source: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Dataset.from_source(source)


def test_indexed_source_loses_only_failed_item() -> None:
    dataset = Dataset.from_source(Squares())
    assert len(dataset) == 5
    assert [int(square) for square, _ in dataset.ignore_errors()] == [0, 1, 4, 16]
    assert dataset.element_spec == (TensorSpec((), np.int64), {"text": TensorSpec((), np.str_)})
    (provider,) = split_providers(dataset)
    assert provider.cardinality() == 5
    positions = iter([4, 1])
    assert [int(square) for square, _ in open_split(dataset, lambda *_: next(positions, None))] == [
        16,
        1,
    ]
    with pytest.raises(UnimplementedError, match="from_generator"):
        split_providers(Dataset.from_source({1, 2}))


@pytest.mark.parametrize("names", [("get_state", "set_state"), ("state_dict", "load_state_dict")])
def test_iterator_with_state_is_not_reread(
    names: tuple[str, str],
) -> None:
    source = Stateful(6, names)
    dataset = Dataset.from_source(source)
    with iter(dataset) as iterator:
        found = [int(next(iterator)) for _ in range(3)]
        state = json.loads(json.dumps(iterator.state_dict()))
    source.read.clear()
    with iter(dataset) as other:
        other.load_state_dict(state)
        assert json.loads(json.dumps(other.state_dict())) == state
        assert found + numbers(other) == [1, 2, 3, 4, 5, 6]
    assert source.read == [4, 5, 6]


def test_torch_dataset_is_source() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    class Stream(IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
        def __iter__(self) -> Any:
            return iter([torch.tensor(1), torch.tensor(2)])

        def __len__(self) -> int:
            return 2

    pairs = TensorDataset(torch.arange(4), torch.ones(4, 2))
    mapped = Dataset.from_source(pairs)
    assert len(mapped) == 4
    assert [(int(x), y.tolist()) for x, y in mapped] == [(x, [1.0, 1.0]) for x in range(4)]
    assert numbers(Dataset.from_source(Stream())) == [1, 2]
    signature = (TensorSpec((None,), np.int64), TensorSpec((None, 2), np.float32))
    loaded = Dataset.from_source(DataLoader(pairs, batch_size=3), output_signature=signature)
    assert [x.shape for x, _ in loaded] == [(3,), (1,)]


def test_hugging_face_dataset_is_source() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"x": [1, 2, 3], "t": ["a", "b", "c"], "v": [[0.5, 1.0]] * 3}
    )
    dataset = Dataset.from_source(table)
    assert len(dataset) == 3
    assert [(int(row["x"]), row["t"], row["v"].tolist()) for row in dataset][1] == (
        2,
        "b",
        [0.5, 1.0],
    )
    stream = Dataset.from_source(table.to_iterable_dataset().with_format("numpy"))
    assert numbers(stream.map(lambda row: row["x"])) == [1, 2, 3]


def test_grain_dataset_is_source() -> None:
    grain = pytest.importorskip("grain")
    ranged = grain.MapDataset.range(6).map(lambda x: x * 2)
    assert numbers(Dataset.from_source(ranged)) == [0, 2, 4, 6, 8, 10]
    stream = Dataset.from_source(ranged.filter(lambda x: x != 4).to_iter_dataset())
    with iter(stream) as iterator:
        found = [int(next(iterator)) for _ in range(2)]
        state = json.loads(json.dumps(iterator.state_dict()))
    assert state["tree"]["own"]["place"] is not None
    with iter(stream) as other:
        other.load_state_dict(state)
        assert found + numbers(other) == [0, 2, 6, 8, 10]


# -- Parquet ---------------------------------------------------------------------------------------


def test_parquet_rows_have_column_types(tmp_path: Path) -> None:
    dataset = ParquetDataset(tables(tmp_path), ["n", "t", "b", "v"])
    first = next(iter(dataset))
    assert {name: type(value) for name, value in first.items()} == {
        "n": np.int64,
        "t": str,
        "b": bytes,
        "v": np.ndarray,
    }
    assert [int(row["n"]) for row in dataset] == [0, 1, 2, 3, 4, 0, 1]
    assert (len(dataset), dataset.op.is_reader) == (7, True)
    assert ParquetDataset(tables(tmp_path), ["t", "n"]).known_spec == {
        "t": TensorSpec((), np.str_),
        "n": TensorSpec((), np.int64),
    }


def test_parquet_batches_end_with_row_group(tmp_path: Path) -> None:
    dataset = ParquetDataset(tables(tmp_path), ["n", "x"], batch_size=2)
    assert [batch["n"].tolist() for batch in dataset] == [[0, 1], [2], [3, 4], [0, 1]]
    assert len(dataset) == 4


def test_parquet_files_are_split_by_row_groups(tmp_path: Path) -> None:
    dataset = ParquetDataset(tables(tmp_path), ["n"])
    (provider,) = split_providers(dataset)
    assert provider.cardinality() == 3
    positions = iter([1])
    assert [int(row["n"]) for row in open_split(dataset, lambda *_: next(positions, None))] == [
        3,
        4,
    ]


def test_parquet_faults_are_named(tmp_path: Path) -> None:
    names = tables(tmp_path)
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with pytest.raises(
        InvalidArgumentError, match="has no column 'y': it has 'n', 'x', 't', 'v', 'b'"
    ):
        ParquetDataset(names, ["n", "y"])
    with pytest.raises(InvalidArgumentError, match="batch_size must be > 0"):
        ParquetDataset(names, batch_size=0)
    with pytest.raises(NotFoundError, match="none"):
        ParquetDataset(str(tmp_path / "none"))
    (tmp_path / "text").write_text("no table")
    with pytest.raises(DataLossError, match="text"):
        ParquetDataset(str(tmp_path / "text"))
    parquet.write_table(arrow.table({"n": [1, None]}), tmp_path / "holes")
    with pytest.raises(InvalidArgumentError, match="column 'n' lacks 1 values"):
        list(ParquetDataset(str(tmp_path / "holes")))


def test_missing_pyarrow_is_named() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None; import zmqdist.data as d; d.ParquetDataset('x')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stderr.strip().endswith(
        "ImportError: ParquetDataset needs pyarrow: pip install pyarrow"
    )


# -- structures ------------------------------------------------------------------------------------


@attrs.define
class Sample:
    image: Any
    _label: Any


class Row(NamedTuple):
    sample: Any
    number: Any


def test_attrs_objects_are_structures() -> None:
    dataset = Dataset.from_tensor_slices(Sample(np.ones((4, 2)), np.arange(4))).map(
        lambda s: Sample(s.image * 2, s.label)
    )
    first = next(iter(dataset.batch(2)))
    assert (type(first).__name__, first._fields) == ("Sample", ("image", "label"))
    assert (first.image.tolist(), first.label.tolist()) == ([[2, 2], [2, 2]], [0, 1])
    spec = dataset.element_spec
    assert (spec.image, spec.label) == (TensorSpec((2,), np.float64), TensorSpec((), np.int64))
    signature = Sample(TensorSpec((2,), np.float64), TensorSpec((), np.int64))
    assert dataset.map(lambda s: s, output_signature=signature).element_spec == spec
    zipped = Dataset.zip(Sample(Dataset.range(2), Dataset.range(2, 4)))
    assert [(int(s.image), int(s.label)) for s in zipped] == [(0, 2), (1, 3)]
    nested = Dataset.from_tensors(Row(Sample(np.zeros(2), 1), 2))
    assert next(iter(nested)).sample.image.tolist() == [0, 0]
    back = load_elements(json.loads(json.dumps(save_elements([first]))))
    assert plain(back[0]) == plain(first)
    assert type(back[0]) is type(first)


def test_sparse_elements_survive_batch_and_unbatch() -> None:
    dense = np.array([[0, 1, 0], [2, 0, 3]])
    sparse = Sparse.of(dense)
    assert sparse.to_dense().tolist() == dense.tolist()
    dataset = Dataset.from_source([0, 1, 2]).map(lambda x: (Sparse.of(dense * int(x)), x)).batch(2)
    batches = list(dataset)
    assert [batch.to_dense().tolist() for batch, _ in batches] == [
        [(dense * 0).tolist(), dense.tolist()],
        [(dense * 2).tolist()],
    ]
    rows = list(dataset.map(lambda batch, _: batch).unbatch())
    assert [row.to_dense().tolist() for row in rows] == [(dense * x).tolist() for x in range(3)]
    (back,) = load_elements(json.loads(json.dumps(save_elements([sparse]))))
    assert type(back) is Sparse
    assert back.to_dense().tolist() == dense.tolist()
    spec = dataset.element_spec[0]
    assert (spec.indices.shape, spec.values.shape, spec.dense_shape.shape) == (
        (None, 3),
        (None,),
        (3,),
    )
    assert dataset.map(lambda batch, _: batch).unbatch().element_spec.indices.shape == (None, 2)
    with pytest.raises(InvalidArgumentError, match="differ in shape"):
        list(Dataset.from_source([1, 2]).map(lambda n: Sparse.of(np.ones(n))).batch(2))


def test_ragged_elements_survive_unbatch() -> None:
    rows = Dataset.range(1, 6).map(np.arange, output_signature=TensorSpec((None,), np.int64))
    ragged = rows.ragged_batch(2)
    assert [type(batch) for batch in ragged] == [Ragged] * 3
    assert numbers(ragged.unbatch()) == numbers(rows)
    (back,) = load_elements(json.loads(json.dumps(save_elements([next(iter(ragged))]))))
    assert type(back) is Ragged
    assert back.to_list() == [[0], [0, 1]]
