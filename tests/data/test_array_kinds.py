"""Each kind of array in a dataset: it comes out as it was, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.wire.helpers import same
from tests.wire.test_plain_arrays import SUBCLASSES
from zmqdist.data import Dataset
from zmqdist.data.service import elements
from zmqdist.data.service.compression import compress_batch, decompress_batch
from zmqdist.errors import InvalidArgumentError
from zmqdist.wire import safe

NUMPY_2 = np.lib.NumpyVersion(np.__version__) >= "2.0.0"

NESTED = np.dtype(
    {"names": ["x", "y"], "formats": ["i1", ">f8"], "offsets": [3, 8], "titles": ["tx", "ty"]}
)


def _bfloat16() -> np.ndarray[Any, Any]:
    return np.arange(4).astype(pytest.importorskip("ml_dtypes").bfloat16)


KINDS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "big-endian": lambda: np.arange(4).astype(">i4"),
    "structured": lambda: np.array(
        [(1, 2.0), (3, 4.0), (5, 6.0), (7, 8.0)], [("id", "i4"), ("w", "f8")]
    ),
    "nested, with titles and offsets": lambda: np.zeros(4, [("a", NESTED, (2,)), ("b", "M8[3s]")]),
    "aligned": lambda: np.ones(4, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "fields that overlap": lambda: np.ones(
        4, np.dtype({"names": ["x", "y"], "formats": ["i4", "f4"], "offsets": [0, 0]})
    ),
    "records": lambda: np.zeros(4, np.dtype((np.record, [("a", "i4")]))),
    "long double": lambda: np.arange(4).astype(np.longdouble) / 3,
    "raw": lambda: np.frombuffer(b"abcdefghijkl", "V3"),
    "bfloat16": _bfloat16,
    "times": lambda: np.arange(4).astype("M8[25s]"),
    "big-endian times": lambda: np.arange(4).astype(">M8[ms]"),
    "long long": lambda: np.arange(4, dtype=np.longlong),
    "most dimensions of a batch": lambda: np.arange(4.0).reshape(4, *[1] * (32 if NUMPY_2 else 31)),
}


def _saved(dataset: Any, folder: Path) -> Any:
    dataset.save(str(folder / "saved"))
    return Dataset.load(str(folder / "saved"))


def _sent(dataset: Any, codec: str) -> list[Any]:
    body, frames = safe.encode(compress_batch(elements.pack(list(dataset)), codec))
    received = safe.decode(body, [bytearray(frame) for frame in frames], "worker")
    return elements.unpack(decompress_batch(received, "worker"), "worker")


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "batch": lambda rows, folder: rows.batch(4),
    "padded_batch": lambda rows, folder: rows.padded_batch(4),
    "rebatch": lambda rows, folder: rows.batch(3).rebatch(4),
    "unbatch": lambda rows, folder: rows.batch(4).unbatch().batch(4),
    "window": lambda rows, folder: rows.window(4).flat_map(lambda window: window.batch(4)),
    "shuffle": lambda rows, folder: rows.shuffle(1).batch(4),
    "save": lambda rows, folder: _saved(rows, folder).batch(4),
    "cache": lambda rows, folder: rows.cache(str(folder / "cache")).batch(4),
    "service": lambda rows, folder: Dataset.from_source(_sent(rows, "")).batch(4),
    "service, compressed": lambda rows, folder: Dataset.from_source(_sent(rows, "ZLIB")).batch(4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_rows_make_array_again(way: str, kind: str, tmp_path: Path) -> None:
    array = KINDS[kind]()
    [batch] = WAYS[way](Dataset.from_tensor_slices(array), tmp_path)
    assert repr(batch.dtype) == repr(array.dtype)
    assert same(array, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_fit_spec(kind: str) -> None:
    dataset = Dataset.from_tensor_slices(KINDS[kind]())
    for one in dataset:
        assert dataset.element_spec.problem(one) is None


def test_rows_of_text_are_str() -> None:
    assert list(Dataset.from_tensor_slices(np.array(["a", "bc"], ">U9"))) == ["a", "bc"]


@pytest.mark.parametrize("name", SUBCLASSES)
def test_array_subclass_is_refused_by_name(name: str) -> None:
    value, text = SUBCLASSES[name]
    if not isinstance(value, tuple):  # the items of a tuple are refused one by one
        with pytest.raises(InvalidArgumentError, match=f"an element: .*{text}"):
            next(iter(Dataset.range(1).map(lambda _: value)))
    with pytest.raises(InvalidArgumentError, match=text):
        Dataset.from_tensors(value)


@pytest.mark.parametrize(
    "array",
    [np.array([1, "a"], object), np.zeros(2, [("a", object)])]
    + ([np.array(["a"], np.dtypes.StringDType())] if hasattr(np.dtypes, "StringDType") else []),
    ids=lambda array: str(array.dtype),
)
def test_object_arrays_are_refused_with_hint(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"Python objects: give it .* text \(astype\(str\)\)"
    ):
        Dataset.from_tensor_slices(array)


def test_array_of_maximal_rank_is_not_batched(tmp_path: Path) -> None:
    most = 64 if NUMPY_2 else 32
    dataset = Dataset.from_tensors(np.ones([1] * most)).repeat(2)
    assert [one.ndim for one in _sent(dataset, "")] == [most, most]
    for ask in (lambda: next(iter(dataset.batch(2))), lambda: dataset.save(str(tmp_path / "s"))):
        with pytest.raises(InvalidArgumentError, match=f"cannot batch arrays of {most} dimensions"):
            ask()
