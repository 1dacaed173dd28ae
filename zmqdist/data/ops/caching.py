"""cache: elements that are computed once, and recorded in memory or in a file.

Rules
    The record of the first complete pass is kept, and the record of a pass that ends early is
    dropped. An iterator that finds a record when it is opened reads the record. An iterator that
    finds no record records its own pass.

    The record in memory belongs to the Dataset object. All pipelines that name the same file share
    the record in the file (chunks.py). An iterator writes the record as `<filename>.data.part`, and
    renames it at the end of the pass. If `<filename>.data.part` exists already, because another
    iterator is writing it or a crashed program has left it, the iterator raises AlreadyExistsError.

    A state contains the elements that were recorded so far, or the whole record if it is in memory,
    so that another process can continue.

    Elements of a record in memory are yielded read-only, also in the pass that records them.
    Otherwise a reader that changed an element would find the change in the next pass. The pass that
    records a file yields read-only elements too. Elements that are read from the file belong to
    their reader.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from zmqdist.data import storage
from zmqdist.data.chunks import ElementsFile, read_elements
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, OperatorNode, load_elements, save_elements
from zmqdist.data.ops.base import Op
from zmqdist.data.structure import READY, copy_dicts, read_only
from zmqdist.errors import AlreadyExistsError
from zmqdist.files import open_regular


class _CacheNode(OperatorNode):
    """Runs a cache in memory.

    Attributes:
      position: how many elements of the record were yielded.
      reading: the record from which this pass reads, or None while this pass records.
      recorded: the elements that this pass has recorded so far.
      dicts: whether the elements contain dicts, which have to be copied for each reader.
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.position = 0
        self.reading: list[Any] | None = dataset.memory.values.get("cache")
        self.recorded: list[Any] = []
        self.dicts: bool = dataset.memory.values.get("cache has dicts", False)

    def run(self) -> Iterator[Any]:
        if self.reading is not None:
            dicts = self.dicts
            for x in self.reading[self.position :]:
                self.position += 1
                yield copy_dicts(x) if dicts else x
            return
        for x in self.source():
            if type(x) in READY:
                self.recorded.append(x)
                yield x
            else:
                yield self._record(x)
        if not self.context.probing:
            # a probe for the spec is no pass over the dataset, so it leaves no record
            self._keep(self.recorded)

    def _keep(self, record: list[Any]) -> None:
        self.dataset.memory.values["cache has dicts"] = self.dicts
        self.dataset.memory.values["cache"] = record

    def _record(self, x: Any) -> Any:
        """Record an element. Return the element as the node yields it: read-only, with dicts of its
        own."""
        stored = read_only(x)
        self.recorded.append(stored)
        output = read_only(stored)
        self.dicts = self.dicts or output is not stored
        return output

    def state(self) -> dict[str, Any]:
        record = self.recorded if self.reading is None else self.reading
        return {
            "position": self.position,
            "reading": self.reading is not None,
            "held": save_elements(record),
        }

    def load(self, state: dict[str, Any]) -> None:
        record = list(map(read_only, load_elements(state["held"])))
        self.dicts = any(read_only(x) is not x for x in record)
        self.position = state["position"]
        self.reading, self.recorded = (record, []) if state["reading"] else (None, record)
        if state["reading"]:
            self._keep(record)


@operator("cache", _CacheNode)
class Cache(Op):
    """Records the elements of the first complete pass in memory, and yields them in later
    passes.
    """


class _FileCacheNode(OperatorNode):
    """Runs a cache in a file.

    Attributes:
      position: how many elements were yielded.
      reading: whether this pass reads the elements from the file.
      carried: the elements from a loaded state, which have to be written to the file before any new
        element.
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.position = 0
        self.path = self.op.filename + ".data"
        self.reading = os.path.exists(self.path)
        self.part: ElementsFile | None = None
        self.carried: list[Any] = []

    def run(self) -> Iterator[Any]:
        if self.reading:
            yield from self._recorded()
        elif self.context.probing:
            yield from self.source()
        else:
            part = self._opened()
            for x in self.source():
                part.write(x)
                self.position += 1
                # Yield read-only arrays, because they are written to the file later, with their
                # block, and must not change until then.
                yield read_only(x)
            part.close()
            storage.rename(self.path + ".part", self.path)
            self.part, self.reading = None, True

    def _opened(self) -> ElementsFile:
        if self.part is None:
            # Create the file exclusively, so that of several iterators that begin to record at the
            # same time only one succeeds.
            with contextlib.suppress(FileExistsError), open(self.path + ".part", "xb"):
                self.part = ElementsFile(self.path + ".part", "")
            if self.part is None:
                raise AlreadyExistsError(
                    f"There appears to be a concurrent caching iterator running: {self.path}.part "
                    f"exists."
                    " If a program that crashed has left it, delete it.",
                )
            for x in self.carried:
                self.part.write(x)
        return self.part

    def _recorded(self) -> Iterator[Any]:
        with open_regular(self.path) as file:
            for x in islice(read_elements(file, self.path), self.position, None):
                self.position += 1
                yield x

    def close(self) -> None:
        super().close()
        self._give_up()

    def _give_up(self) -> None:
        """Delete the unfinished file, if this node is writing one."""
        if self.part is not None:
            self.part.abort()
            self.part = None
            with contextlib.suppress(OSError):
                os.unlink(self.path + ".part")

    def state(self) -> dict[str, Any]:
        if self.part is None:
            elements = save_elements(self.carried)
        else:
            # The state contains the elements, and not the name of the file, because `close` deletes
            # the file.
            self.part.flush()
            with open(self.path + ".part", "rb") as file:
                elements = save_elements(read_elements(file, self.path))
        return {"position": self.position, "reading": self.reading, "held": elements}

    def load(self, state: dict[str, Any]) -> None:
        self._give_up()
        self.position, self.reading = state["position"], state["reading"]
        self.carried = load_elements(state["held"])


@operator("cache_file", _FileCacheNode)
class FileCache(Op):
    """Records the elements of the first complete pass in a file, from which later passes and other
    processes read them."""

    filename: str = ""
