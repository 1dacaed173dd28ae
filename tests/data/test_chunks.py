"""Files of elements: what comes back, and what anybody can read without us."""

from __future__ import annotations

import collections
import contextlib
import gzip
import io
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpys

from tests.data.helpers import plain
from zmqdist.data import Dataset, storage
from zmqdist.data.chunks import (
    ROWS_MAX,
    ElementsFile,
    read_elements,
    spec_from_json,
    spec_to_json,
)
from zmqdist.data.structure import spec_of
from zmqdist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnimplementedError,
)
from zmqdist.specs import TensorSpec

Point = collections.namedtuple("Point", "x y")

DTYPES = st.one_of(
    numpys.integer_dtypes(endianness="?"),
    numpys.floating_dtypes(endianness="?"),
    numpys.complex_number_dtypes(),
    numpys.boolean_dtypes(),
    numpys.datetime64_dtypes(),
    numpys.unicode_string_dtypes(),
    numpys.byte_string_dtypes(),
    st.just(np.dtype([("a", "<i4"), ("b", ">f8")])),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: numpys.arrays(dtype, numpys.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
)
LEAVES = st.one_of(ARRAYS, SCALARS, st.text(), st.binary())
ELEMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=5,
)


few = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def written(*elements: Any) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        writer = ElementsFile(file.name, "")
        with contextlib.ExitStack() as stack:
            stack.callback(writer.abort)
            for element in elements:
                writer.write(element)
            writer.close()
        return file.read()


def read(data: bytes) -> list[Any]:
    return list(read_elements(io.BytesIO(data), "here"))


def exact(value: Any) -> Any:
    """Types and bits of an element."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return type(value).__name__, [exact(item) for item in value]
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.tobytes()
    return type(value), value.tobytes() if isinstance(value, np.generic) else value


@few
@given(st.lists(ELEMENTS, max_size=6))
def test_elements_come_back_exactly(elements: list[Any]) -> None:
    assert list(map(exact, read(written(*elements)))) == list(map(exact, elements))


def test_similar_elements_share_blocks() -> None:
    elements = list(Dataset.range(3 * ROWS_MAX).map(lambda x: (x, np.full(3, x), str(int(x)))))
    data = written(*elements)
    assert data.count(b'"rows"') == 3
    assert list(map(exact, read(data))) == list(map(exact, elements))


def test_arrays_are_private_and_writable() -> None:
    first, second = read(written(np.zeros(2), np.zeros(2)))
    first += 1
    assert (first.tolist(), second.tolist()) == ([1, 1], [0, 0])


def test_ml_dtypes_come_back() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    elements = [np.arange(3, dtype=ml_dtypes.bfloat16), ml_dtypes.bfloat16(1.5)]
    assert list(map(exact, read(written(*elements)))) == list(map(exact, elements))


def test_file_is_readable_with_numpy_alone() -> None:
    file = io.BytesIO(written(*({"x": np.full(2, n), "t": "ab"[:n]} for n in range(3))))
    block = json.loads(file.readline())
    arrays = [np.load(file) for _ in block["arrays"]]
    assert block == {
        "rows": 3,
        "arrays": [["<i8", [3, 2]], ["|u1", [3]], ["<i8", [3]]],
        "element": ["dict", ["x", "array"], ["t", "str"]],
    }
    assert [one.tolist() for one in arrays] == [[[0, 0], [1, 1], [2, 2]], list(b"aab"), [0, 1, 3]]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB", "SNAPPY"])
def test_compression_is_that_of_standard_library(tmp_path: Path, compression: str) -> None:
    elements = [np.arange(5), np.arange(5)]
    file = ElementsFile(str(tmp_path / "file"), compression)
    for element in elements:
        file.write(element)
    file.close()
    data = (tmp_path / "file").read_bytes()
    unpack = {"": bytes, "GZIP": gzip.decompress}.get(compression, zlib.decompress)
    assert unpack(data) == written(*elements)
    with storage.decompressing(storage.open_read(str(tmp_path / "file")), compression) as opened:
        assert list(map(plain, read_elements(opened, "here"))) == list(map(plain, elements))


@pytest.mark.parametrize("cut", [1, 10, 40, 100, 200, -1])
@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_truncated_file_is_data_loss(tmp_path: Path, cut: int, compression: str) -> None:
    file = ElementsFile(str(tmp_path / "file"), compression)
    file.write(np.random.default_rng(1).integers(0, 255, 500))
    file.close()
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data[:cut])
    opened = storage.decompressing(storage.open_read(str(tmp_path / "file")), compression)
    with opened, pytest.raises(DataLossError, match="file: corrupted record"):
        list(read_elements(opened, str(tmp_path / "file")))


@pytest.mark.parametrize(
    "data",
    [
        b"text\n",
        b"{}\n",
        b"[1]\n",
        b'{"rows": 1, "arrays": [], "element": "array"}\n',
        b'{"rows": 1, "arrays": [], "element": ["list"]}\n',
        b'{"rows": 1, "arrays": [], "element": ["namedtuple", "class", ["x y", 1]]}\n',
        written(np.int64(1)).replace(b'"scalar"', b'"what??"'),
        written("text").replace(b'"str"', b'"set"'),
        written((np.int64(1),)).replace(b'"rows":1', b'"rows":2') + b"x",
    ],
)
def test_foreign_bytes_are_data_loss(data: bytes) -> None:
    with pytest.raises(DataLossError, match="here: corrupted record"):
        read(data)


def test_file_contains_no_pickle() -> None:
    file = io.BytesIO(b'{"rows": 1, "arrays": [["|O", [1]]], "element": "array"}\n')
    file.seek(0, io.SEEK_END)
    np.lib.format.write_array(file, np.array([print]), allow_pickle=True)
    with pytest.raises(DataLossError):
        read(file.getvalue())


def test_unwritable_elements_are_refused_with_hint() -> None:
    with pytest.raises(UnimplementedError, match=r"batch\(\) or flat_map\(\)"):
        written(next(iter(Dataset.range(3).window(2))))
    with pytest.raises(InvalidArgumentError, match="a dict with keys"):
        written({(1, 2): np.int64(1)})


@few
@given(ELEMENTS)
def test_specs_come_back(element: Any) -> None:
    spec = spec_of(element)
    back = spec_from_json(json.loads(json.dumps(spec_to_json(spec))))
    assert repr(back) == repr(spec)


def test_specs_with_unknown_lengths_and_faults() -> None:
    spec = {"x": TensorSpec((None, 3), np.float32), "y": TensorSpec(None, np.str_)}
    assert spec_from_json(spec_to_json(spec)) == spec
    for text in ({}, ["list"], {"shape": [1], "dtype": "what"}, {"shape": "x", "dtype": "<i8"}):
        with pytest.raises(DataLossError):
            spec_from_json(text)


# -- files and folders -----------------------------------------------------------------------------


def test_failed_write_leaves_old_file(tmp_path: Path) -> None:
    target = str(tmp_path / "file")
    storage.write(target, b"old")
    with pytest.raises(FileNotFoundError):
        storage.write(target, b"new", staging_folder=str(tmp_path / "gone"))
    assert storage.read(target) == b"old"
    assert storage.list_names(str(tmp_path)) == ["file"]
    (tmp_path / "other.tmp").write_bytes(b"")
    assert storage.list_names(str(tmp_path)) == ["file"]
    assert storage.list_names(str(tmp_path / "none")) == []


def test_urls_go_through_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"file://{tmp_path}/folder"
    storage.check_renames(url)
    storage.make_folder(storage.join(url, "deep"))
    storage.write(storage.join(url, "deep", "file"), b"data")
    assert storage.read(storage.join(url, "deep", "file")) == b"data"
    assert storage.list_names(url) == ["deep"]
    storage.rename(storage.join(url, "deep"), storage.join(url, "other"))
    assert storage.list_names(storage.join(url, "other")) == ["file"]
    storage.remove(storage.join(url, "other", "file"))
    assert storage.exists(storage.join(url, "other"))
    storage.remove_tree(url)
    storage.remove_tree(url)
    assert not storage.exists(url)
    with pytest.raises(FailedPreconditionError, match="no atomic rename"):
        storage.check_renames("memory://folder")


def test_url_without_fsspec_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(FailedPreconditionError, match="needs fsspec: pip install fsspec"):
        storage.read("s3://bucket/file")
