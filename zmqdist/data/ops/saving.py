"""Elements in a folder: save and load.

Layout
    path/dataset.json           the newest run: its folder, number of elements, spec, compression, files; replaced by a rename at the end
    path/<run>/shard_00000      elements as in caching.py

    Saving again makes another run beside the old one, so that whoever reads the old one can go on.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.ops.base import operator
from zmqdist.data.ops.caching import read_elements, write_element
from zmqdist.data.ops.readers import Reader, ReaderNode
from zmqdist.data.ops.sources import Slices, Tensors
from zmqdist.data.ops.windows import int_scalar
from zmqdist.data.structure import from_json, invalid, to_json
from zmqdist.errors import DataLossError, NotFoundError

if TYPE_CHECKING:
    from zmqdist.data.dataset import Dataset
    from zmqdist.data.tree import Tree

WAIT_S = 5.0
"""Seconds between two looks of `load(wait=True)`."""

_METADATA = "dataset.json"


@operator("saved", ReaderNode)
@dataclass(frozen=True)
class Saved(Reader):
    """Elements of the files of a run."""

    spec: Any = None
    files: int = 0
    count: int = 0

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        return read_elements(file, path)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count if inputs[0] == self.files else UNKNOWN_CARDINALITY

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return self.spec


class _ZlibFile:
    """Writes a file as one zlib stream."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 closed by close()
        self._press = zlib.compressobj(1)

    def write(self, data: Any) -> None:
        self._file.write(self._press.compress(data))

    def __enter__(self) -> _ZlibFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.write(self._press.flush())
        self._file.close()


def _writing(path: str, compression: str) -> Any:
    if compression == "GZIP":
        return gzip.open(path, "wb", compresslevel=1)
    return _ZlibFile(path) if compression == "ZLIB" else open(path, "wb")


def save(dataset: Tree, path: str, compression: str, shard_func: Callable[..., Any] | None) -> None:
    """Write a run. Raises InvalidArgumentError for a dataset without an end."""
    if dataset.cardinality() == INFINITE_CARDINALITY:
        raise invalid("Saving an infinite dataset is not allowed")
    run = uuid.uuid4().hex[:16]
    os.makedirs(os.path.join(path, run))
    files: dict[int, Any] = {}
    count = 0
    with ExitStack() as opened:
        for x in dataset:
            shard = 0
            if shard_func is not None:
                shard = int_scalar(shard_func(*x) if type(x) is tuple else shard_func(x), "shard_func")
            if shard not in files:
                files[shard] = opened.enter_context(_writing(os.path.join(path, run, f"shard_{shard:05}"), compression))
            write_element(files[shard], x)
            count += 1
    told = {
        "run": run,
        "count": count,
        "compression": compression,
        "spec": to_json(dataset.element_spec),
        "files": [f"shard_{shard:05}" for shard in sorted(files)],
    }
    new = os.path.join(path, f"{_METADATA}.{run}")
    with open(new, "w") as file:
        json.dump(told, file)
    os.replace(new, os.path.join(path, _METADATA))


class OpenFile:
    """The dataset of one file of a run: what `reader_func` gets datasets of."""

    def __init__(self, spec: Any, compression: str) -> None:
        self.spec, self.compression = spec, compression

    def __call__(self, path: Any) -> Dataset:
        from zmqdist.data.tree import make

        return make(Saved(self.compression, self.spec, 1, UNKNOWN_CARDINALITY), [make(Tensors.build(str(path)))])


def load(
    path: str, element_spec: Any, compression: str | None, reader_func: Callable[..., Any] | None, wait: bool
) -> Dataset:
    """The newest run in a folder.

    Raises:
      NotFoundError: there is none, and nobody shall wait. ValueError: another spec. DataLossError: another compression.
    """
    from zmqdist.data.tree import make

    told = _metadata(path, wait)
    spec = from_json(told["spec"])
    if element_spec is not None and element_spec != spec:
        raise ValueError(f"User specified element_spec {element_spec}, but the actual element_spec is {spec}.")
    actual = told["compression"]
    if compression is not None and compression != actual:
        raise DataLossError(
            None, None, f"User specified compression {compression}, but the actual compression is {actual or None}."
        )
    names = [os.path.join(path, told["run"], name) for name in told["files"]]
    files = make(Slices.build(names)) if names else make(Slices.build([""])).take(0)
    if reader_func is not None:
        return reader_func(files.map(OpenFile(spec, actual)))  # type: ignore[no-any-return]
    return make(Saved(actual, spec, len(names), told["count"]), [files])


def _metadata(path: str, wait: bool) -> dict[str, Any]:
    while True:
        try:
            with open(os.path.join(path, _METADATA)) as file:
                return json.load(file)  # type: ignore[no-any-return]
        except FileNotFoundError:
            if not wait:
                raise NotFoundError(None, None, f"no saved dataset in {path}") from None
        time.sleep(WAIT_S)
