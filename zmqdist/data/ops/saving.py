"""save, load and snapshot: elements in a folder.

Layout
    path/dataset.json           the newest run: its folder, number of elements, spec, compression, files; replaced by a rename at the end
    path/<run>/shard_00000      elements as in chunks.py

    Saving again writes another run and does not change the old run, so that readers of the old run
    can continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from zmqdist import clock as time
from zmqdist.data import snapshot_layout, storage
from zmqdist.data.chunks import ElementsFile, spec_from_json, spec_to_json
from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, make, operator
from zmqdist.data.iterators import Context, NumberedNode, stopped_error
from zmqdist.data.ops import snapshots
from zmqdist.data.ops.base import Op, PickledFunction
from zmqdist.data.ops.snapshots import OpenFile, SavedFiles
from zmqdist.data.ops.sources import Slices
from zmqdist.data.ops.windows import int_scalar
from zmqdist.data.structure import checked_int, invalid, read_only
from zmqdist.errors import DataLossError, FailedPreconditionError, NotFoundError, UnimplementedError
from zmqdist.files import open_regular

WAIT_S = 5.0
"""The longest time between two attempts of `load(wait=True)`, in seconds."""

_METADATA = "dataset.json"
_SHARD = "shard_"
_RUN_NAME = re.compile(r"[0-9a-f]{16}")
_FILE_NAME = re.compile(rf"{_SHARD}-?\d{{1,20}}")

CHECKPOINT_ELEMENTS = 1000
"""The default number of elements between two checkpoints of a save."""


class RunWriter:
    """Writes a run, which is one saved copy of a dataset, into a folder. Readers do not see the run
    before `finish`.

    Between two elements, `pause` returns a checkpoint from which a later writer can continue. The
    later writer cuts off the elements that were written after this checkpoint. In a compressed
    file, each pause ends a compressed stream, and the next element begins another stream. Readers
    join the streams.

    Attributes:
      count: the number of elements written.
    """

    def __init__(
        self,
        path: str,
        compression: str,
        shard_func: Callable[..., Any] | None,
        checkpoint: dict[str, Any] | None = None,
    ) -> None:
        self._path, self._compression, self._shard_func = path, compression, shard_func
        self._run = uuid.uuid4().hex[:16] if checkpoint is None else _run_name(checkpoint["run"])
        self._files: dict[int, ElementsFile] = {}
        self._shards: set[int] = set()
        self.count = 0
        os.makedirs(os.path.join(path, self._run), exist_ok=checkpoint is not None)
        if checkpoint is not None:
            self._resume(checkpoint)

    def _resume(self, checkpoint: dict[str, Any]) -> None:
        """Cut off the elements that were written after the checkpoint, because they will be written
        again.
        """
        self.count = checkpoint["count"]
        for name in os.listdir(os.path.join(self._path, self._run)):
            size = checkpoint["sizes"].get(name)
            file = os.path.join(self._path, self._run, name)
            if size is None:
                os.unlink(file)  # begun after the checkpoint
            else:
                os.truncate(file, size)
                self._shards.add(int(name.removeprefix(_SHARD)))

    def pause(self) -> dict[str, Any]:
        """Write all elements so far to the disk. Return a checkpoint after them, as JSON types."""
        self._close()
        sizes = {}
        for shard in self._shards:
            with open(self._file(shard), "rb") as file:
                # on the disk before the checkpoint, which counts on these bytes
                os.fsync(file.fileno())
                sizes[os.path.basename(file.name)] = os.fstat(file.fileno()).st_size
        return {"run": self._run, "count": self.count, "sizes": sizes}

    def _file(self, shard: int) -> str:
        return os.path.join(self._path, self._run, f"{_SHARD}{shard:05}")

    def write(self, x: Any) -> None:
        """Append an element to the file that `shard_func` selects. Raises ValueError if
        `shard_func` does not return an integer."""
        shard = 0
        if self._shard_func is not None:
            try:
                shard = int_scalar(
                    self._shard_func(*x) if type(x) is tuple else self._shard_func(x), "shard_func"
                )
            except StopIteration as error:
                raise stopped_error("save") from error
        if shard not in self._files:
            # Append, because a pause has closed the file of an earlier part of the run.
            self._shards.add(shard)
            self._files[shard] = ElementsFile(self._file(shard), self._compression, append=True)
        self._files[shard].write(x)
        self.count += 1

    def _close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def finish(self, spec: Any) -> None:
        """Complete the run, and make it the newest run of the folder."""
        self._close()
        # Write the metadata last, because readers find the run through it.
        metadata = {
            "run": self._run,
            "count": self.count,
            "compression": self._compression,
            "spec": spec_to_json(spec),
            "files": [os.path.basename(self._file(shard)) for shard in sorted(self._shards)],
        }
        storage.write(os.path.join(self._path, _METADATA), json.dumps(metadata).encode())

    def abort(self) -> None:
        """Close the files of the run, and delete them."""
        for file in self._files.values():
            file.abort()
        shutil.rmtree(os.path.join(self._path, self._run), ignore_errors=True)


def _run_name(name: Any) -> str:
    """Return `name`, which was read from a file, if it is a valid name of a run's folder. Raises
    ValueError otherwise.

    A path to another folder must not be accepted, because a save that continues a run deletes files
    in the run's folder.
    """
    if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.100} is not the name of a run of a saved dataset")
    return name


def save(
    dataset: DatasetLike,
    path: str,
    compression: str,
    shard_func: Callable[..., Any] | None,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Write the elements of a dataset as a new run in the folder `path`. Raises
    InvalidArgumentError if the dataset is infinite."""
    if dataset.cardinality() == INFINITE_CARDINALITY:
        raise invalid("Saving an infinite dataset is not allowed")
    if checkpoints is not None:
        _save_with_checkpoints(checkpoints, dataset, path, compression, shard_func)
        return
    writer = RunWriter(path, compression, shard_func)
    try:
        for x in dataset:
            writer.write(x)
        writer.finish(dataset.element_spec)
    except BaseException:
        writer.abort()
        raise


@dataclass(frozen=True)
class Checkpoints:
    """The folder of a save's checkpoint, and the number of elements between two checkpoints."""

    directory: str
    interval: int

    @classmethod
    def of(cls, args: Any) -> Checkpoints | None:
        """Return the Checkpoints for the argument `checkpoint_args`, or None for None. Raises
        ValueError if the argument is invalid."""
        if args is None:
            return None
        surplus = set(args) - {"directory", "checkpoint_interval", "max_to_keep", "step_counter"}
        if surplus or "directory" not in args:
            raise ValueError(
                f"checkpoint_args has a `directory` and optionally a `checkpoint_interval`, not "
                f"{sorted(args)}"
            )
        interval = checked_int(
            args.get("checkpoint_interval", CHECKPOINT_ELEMENTS), "checkpoint_interval"
        )
        if interval < 1:
            raise ValueError(f"`checkpoint_interval` must be > 0, not {interval}")
        return cls(os.fspath(args["directory"]), interval)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return the checkpoint that an interrupted save has left in the folder, or None if there
        is no checkpoint."""
        with contextlib.suppress(FileNotFoundError), open_regular(self._name()) as file:
            return json.load(file)  # type: ignore[no-any-return]
        return None

    def write_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the checkpoint of the save, in place of the earlier checkpoint, in one
        step."""
        os.makedirs(self.directory, exist_ok=True)
        storage.write(self._name(), json.dumps(checkpoint).encode())

    def remove_checkpoint(self) -> None:
        """Delete the checkpoint, because the run is complete."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name())

    def _name(self) -> str:
        return os.path.join(self.directory, "save.json")


def _save_with_checkpoints(
    checkpoints: Checkpoints,
    dataset: DatasetLike,
    path: str,
    compression: str,
    shard_func: Callable[..., Any] | None,
) -> None:
    """Write a run, or the rest of an interrupted run. If this fails, the elements up to the last
    checkpoint stay for the next call.

    Raises:
      FailedPreconditionError: the checkpoint belongs to a save of another dataset or to another
        folder.
    """
    identity = {
        "fingerprint": dataset.fingerprint(),
        "path": os.path.abspath(path),
        "compression": compression,
    }
    saved = checkpoints.read_checkpoint()
    if saved is not None and {name: saved[name] for name in identity} != identity:
        raise FailedPreconditionError(
            f"{checkpoints.directory} holds the checkpoint of a save of another dataset or to "
            f"another folder: delete it,"
            " or use another directory",
        )
    writer = RunWriter(path, compression, shard_func, saved and saved["place"])
    with iter(dataset) as iterator:
        if saved is not None:
            iterator.load_state_dict(saved["state"])
        try:
            while True:
                checkpoints.write_checkpoint(
                    identity | {"place": writer.pause(), "state": iterator.state_dict()}
                )
                before = writer.count
                for x in islice(iterator, checkpoints.interval):
                    writer.write(x)
                if writer.count < before + checkpoints.interval:
                    break  # the dataset has ended
        finally:
            # Close the files without deleting them: after an error the next call continues the run.
            writer.pause()
    writer.finish(dataset.element_spec)
    checkpoints.remove_checkpoint()


def load(
    path: str,
    element_spec: Any,
    compression: str | None,
    reader_func: Callable[..., Any] | None,
    wait: bool,
) -> Any:
    """Return a dataset of the newest run in a folder, or of the distributed snapshot in the folder,
    which may be incomplete.

    Raises:
      NotFoundError: the folder has no run and no snapshot, and `wait` is False.
      ValueError: the run or snapshot has another spec, or the snapshot has failed or has another
        compression.
      DataLossError: the run has another compression.
    """
    kind, metadata = _metadata(path, wait)
    spec = spec_from_json(metadata["spec"])
    if element_spec is not None and element_spec != spec:
        raise ValueError(
            f"User specified element_spec {element_spec}, but the actual element_spec is {spec}."
        )
    actual = metadata["compression"]
    if kind == snapshot_layout.METADATA:
        return snapshots.load(path, spec, actual, compression, reader_func)
    if compression is not None and snapshots.checked_compression(compression) != actual:
        raise DataLossError(
            f"User specified compression {compression}, but the actual compression is "
            f"{actual or None}."
        )
    return _load_run(path, metadata, spec, actual, reader_func)


def _load_run(
    path: str, metadata: Any, spec: Any, compression: str, reader_func: Callable[..., Any] | None
) -> Any:
    try:
        run = _run_name(metadata["run"])
        if strange := [name for name in metadata["files"] if not _FILE_NAME.fullmatch(name)]:
            raise ValueError(f"{strange[0]!r:.100} is not the name of a file of a run")
    except (ValueError, TypeError, KeyError) as error:
        raise DataLossError(f"{path}/{_METADATA}: corrupted record: {error}") from None
    names = [os.path.join(path, run, name) for name in metadata["files"]]
    files: Any = make(Slices.build(names or [""]))
    if not names:
        files = files.take(0)
    if reader_func is not None:
        return reader_func(files.map(OpenFile(spec, compression)))
    return make(SavedFiles(compression, spec, len(names), metadata["count"]), [files])


def _metadata(path: str, wait: bool) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of the file that describes the run or snapshot in the folder.
    With `wait`, wait for the file."""
    delay = WAIT_S / 100
    while True:
        for name in (_METADATA, snapshot_layout.METADATA):
            try:
                return name, json.loads(storage.read(storage.join(path, name)))
            except FileNotFoundError:
                pass
            except (ValueError, KeyError) as error:
                raise DataLossError(f"{path}/{name}: corrupted record: {error}") from None
        if not wait:
            raise NotFoundError(f"no saved dataset in {path}")
        time.sleep(delay)
        delay = min(WAIT_S, delay * 1.5)


# -- snapshot --------------------------------------------------------------------------------------


class _SnapshotNode(NumberedNode):
    """Reads the run that is in `folder` when the node is opened. If `folder` has no run, the node
    writes a run while its input is read.

    A node that continues from the state of a pass that wrote a run writes no run itself. It lacks
    the elements before the state, because the earlier pass deletes its incomplete run when it is
    closed.
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.reading = os.path.exists(os.path.join(self.op.folder, _METADATA))
        self.writes = not context.probing
        self.writer: RunWriter | None = None
        if self.reading:
            self._read()

    def _read(self) -> None:
        function = self.op.reader_func
        run = load(self.op.folder, None, None, None if function is None else function.value, False)
        for child in self.children:
            child.close()
        self.children = [self.inner_context(0).open(run)]

    def run(self) -> Iterator[Any]:
        if self.reading or not self.writes:
            yield from self.source()
            return
        for x in self.source():
            if self.writer is None:
                function = self.op.shard_func
                self.writer = RunWriter(
                    self.op.folder,
                    self.op.compression,
                    None if function is None else function.value,
                )
            self.writer.write(x)
            # Yield read-only arrays, because they are written to the file later, with their block,
            # and must not change until then.
            yield read_only(x)
        if self.writer is not None:
            self.writer.finish(self.dataset.element_spec)
            self.writer, self.writes = None, False

    def close(self) -> None:
        super().close()
        if self.writer is not None:
            self.writer.abort()
            self.writer = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"reading": self.reading}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.writer is not None:
            self.writer.abort()
        self.writer, self.writes = None, False
        self.number = state["pass"]
        if state["reading"]:
            self._read()
        elif self.reading:
            self.children = self.context.open_inputs(self.dataset)
        self.reading = state["reading"]
        super().load_state_dict(state)


@operator("snapshot", _SnapshotNode)
class Snapshot(Op):
    """Stores the elements of a complete pass in a folder that is only for this pipeline, from which
    later iterators read them."""

    folder: str
    compression: str
    reader_func: PickledFunction | None
    shard_func: PickledFunction | None

    def split_inputs(self, count: int) -> tuple[int, ...]:
        raise UnimplementedError("Splitting is not implemented for snapshot datasets")
