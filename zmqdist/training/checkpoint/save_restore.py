"""`save`, `restore` and `load`: write a program's variables to a folder and read them back.

Promises
    1. When `save` returns, the checkpoint is on disk, complete, with the slots of the optimizers
       beside each variable.
    2. Each shard is saved with the contents that it had at one moment. These moments differ between
       shards, because training goes on during a save, so a shard may contain updates that another
       shard does not.
    3. `restore` checks names, shapes, dtypes and every file before it assigns a value, so that a
       refused restore has changed nothing.
    4. A variable and its slots can be restored into any number of shards.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from zmqdist.data import storage
from zmqdist.field_types import checked, converted
from zmqdist.limits import CHECKPOINT_SHARDS_AT_ONCE
from zmqdist.training.checkpoint.manifest import Part, Plain
from zmqdist.training.checkpoint.reader import CheckpointReader
from zmqdist.training.checkpoint.structure import Leaf, leaves, shards_of
from zmqdist.training.checkpoint.writer import ToWrite, write


@checked
def save(path: str | os.PathLike[str], variables: Any, *, step: SupportsIndex | None = None) -> str:
    """Write a checkpoint, or replace the one at `path`. Blocks until the checkpoint is on disk.

    >>> weights = zd.Variable([1.0, 2.0])
    >>> path = zd.checkpoint.save(f"{folder}/saved", {"weights": weights, "epoch": 3})
    >>> zd.checkpoint.load(path)
    {'epoch': 3, 'weights': array([1., 2.])}

    Args:
      path: a folder, which is made if necessary, or a URL that fsspec knows.
      variables: a variable, a list of variables (saved under their names), or any structure of
        dicts, lists and `Checkpoint`s with variables, arrays, numbers and strings.
      step: a number that the checkpoint records. It is an integer of Python or NumPy, or a variable
        that holds an integer. With None no number is recorded.

    Returns:
      The absolute path of the checkpoint.

    Raises:
      TypeError, ValueError: an item cannot be saved, two items have one name, or `step` is not an
        integer of 0 or more.
      ResourceExhaustedError, UnknownError: the disk is full, or has another fault. An earlier
        checkpoint at `path` is unchanged.
      PSUnavailableError: a variable cannot be read.
    """
    return save_numbered(
        storage.absolute(path), variables, None if step is None else whole(step), 0
    )


def whole(step: SupportsIndex) -> int:
    """Return a step as an int. Raises TypeError or ValueError if the step is not an integer of 0 or
    more."""
    number = converted("step", index, step)
    if number < 0:
        raise ValueError(f"step is {number}, wants 0 or more")
    return number


def save_numbered(path: str, variables: Any, step: int | None, serial: int) -> str:
    """Write a checkpoint as `save` does, with a serial number that orders the checkpoints of one
    directory. Return its path."""
    arrays: list[ToWrite] = []
    values: dict[str, Plain] = {}
    for name, leaf in leaves(variables).items():
        if leaf.is_handle:
            shards = [(shard.start, shard.stop, shard.read) for shard in shards_of(leaf.value)]
            arrays.append(
                ToWrite(name, tuple(leaf.value.shape), np.dtype(leaf.value.dtype), shards, True)
            )
        elif leaf.is_array:
            # copy the array, because the program may change it during the save
            array = np.array(leaf.value)
            rows = array.shape[0] if array.shape else 1
            arrays.append(
                ToWrite(name, array.shape, array.dtype, [(0, rows, partial(Part, array))], False)
            )
        else:
            values[name] = leaf.value
    write(path, arrays, values, step=step, serial=serial)
    return path


@checked
def restore(path: str | os.PathLike[str], variables: Any, strict: bool = True) -> None:
    """Restore a checkpoint that `save` wrote. Variables and their slots are assigned, arrays are
    changed in place, and numbers and strings are replaced in their dict, list or Checkpoint. Blocks
    until all are restored.

    >>> weights = zd.Variable([1.0, 2.0])
    >>> path = zd.checkpoint.save(f"{folder}/restored", {"weights": weights})
    >>> zd.checkpoint.restore(path, {"weights": weights.assign([0.0, 0.0])})
    >>> weights.numpy()
    array([1., 2.])

    Args:
      path: path of the checkpoint.
      variables: as for `save`. A variable may have other shards than when it was saved.
      strict: if True, `variables` and the checkpoint must have the same names. If False, the names
        that are in both are restored.

    Raises:
      ValueError: names, a shape or a dtype of the checkpoint differ from those of `variables`, no
        name is in both, or an array is read-only.
      TypeError: `variables` is an array, number or text, or has a number or text in a tuple, where
        it cannot be replaced.
      NotFoundError: there is no such checkpoint, or it was deleted during the restore.
      DataLossError: the checkpoint is damaged. The error text names file, variable and shard.
      FailedPreconditionError: a newer zmqdist wrote the checkpoint.
      PSUnavailableError: a variable could not be assigned. Other variables may have been assigned
        before. All other errors are raised before anything has changed, unless a file was changed
        or deleted during the restore.
    """
    targets = leaves(variables)
    reader = CheckpointReader(path)
    saved_names = set(reader.manifest.names)
    missing, extra = sorted(targets.keys() - saved_names), sorted(saved_names - targets.keys())
    if strict and (missing or extra):
        differences = [f"it lacks {_listed(missing)}"] if missing else []
        differences += [f"it also holds {_listed(extra)}"] if extra else []
        raise ValueError(
            f"checkpoint {reader.path} has other names: {', and '.join(differences)} "
            f"(strict=False restores the names that both have)"
        )
    if saved_names and targets and not saved_names & targets.keys():
        raise ValueError(
            f"checkpoint {reader.path} holds {_listed(sorted(saved_names))}, and none of "
            f"{_listed(sorted(targets))}: use names that it has"
        )
    fill(reader, {name: leaf for name, leaf in targets.items() if name in saved_names})


@checked
def load(path: str | os.PathLike[str], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the contents of a checkpoint by name: arrays, numbers and strings. Needs no cluster.

    >>> path = zd.checkpoint.save(f"{folder}/loaded-values", {"w": np.ones(2), "epoch": 3})
    >>> zd.checkpoint.load(path, ["epoch"])
    {'epoch': 3}

    Args:
      names: the names of the items to return. None means all items.

    Raises:
      NotFoundError, DataLossError, FailedPreconditionError: as `restore`.
      KeyError: the checkpoint does not hold one of `names`.
    """
    reader = CheckpointReader(path)
    manifest = reader.manifest
    chosen_names = manifest.names if names is None else list(names)
    missing = sorted(set(chosen_names) - set(manifest.names))
    if missing:
        raise KeyError(
            f"checkpoint {reader.path} does not hold {_listed(missing)}; it holds "
            f"{_listed(manifest.names)}"
        )
    reader.verify(chosen_names)
    return {
        name: manifest.values[name] if name in manifest.values else reader.whole(name)
        for name in chosen_names
    }


def fill(reader: CheckpointReader, targets: dict[str, Leaf]) -> None:
    """Restore leaves that the checkpoint holds. All leaves are checked before the first leaf is
    assigned."""
    for name, leaf in targets.items():
        check(reader, name, leaf)
    reader.verify(targets)
    with ThreadPoolExecutor(CHECKPOINT_SHARDS_AT_ONCE, "zmqdist-checkpoint") as threads:
        jobs = [
            threads.submit(_put, reader, name, leaf)
            for name, leaf in targets.items()
            if leaf.is_handle
        ]
        for job in jobs:
            job.result()
    for name, leaf in targets.items():
        if not leaf.is_handle:
            _put(reader, name, leaf)


def check(reader: CheckpointReader, name: str, leaf: Leaf) -> None:
    """Raise ValueError or TypeError if the value that the checkpoint holds under `name` cannot be
    restored to a leaf."""
    manifest, value = reader.manifest, leaf.value
    entry = manifest.entries.get(name)
    if leaf.is_handle or leaf.is_array:
        if entry is None or entry.shape != tuple(value.shape) or entry.dtype != value.dtype:
            saved = entry if entry is not None else f"{manifest.values[name]!r:.80}"
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)} and dtype {value.dtype}, and in "
                f"checkpoint {reader.path} it is {saved}"
            )
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise ValueError(f"{name!r} is a read-only array: pass a writable array")
    elif entry is not None or not _alike(value, manifest.values[name]):
        saved = entry if entry is not None else f"{manifest.values[name]!r:.80}"
        raise ValueError(
            f"{name!r} is {value!r:.80}, and in checkpoint {reader.path} it is {saved}"
        )
    if leaf.put is None and not leaf.is_handle and not isinstance(value, np.ndarray):
        raise TypeError(
            f"{name!r} is in a tuple, where it cannot be replaced: put it in a dict or list"
        )


def _alike(first: Plain, second: Plain) -> bool:
    """Return whether one of two values may replace the other. This is so if both are numbers, both
    are bools, both are strings, or one of them is None.
    """
    kinds = [
        bool if isinstance(value, bool) else str if isinstance(value, str) else float
        for value in (first, second)
    ]
    return first is None or second is None or kinds[0] is kinds[1]


def _put(reader: CheckpointReader, name: str, leaf: Leaf) -> None:
    if leaf.is_handle:
        cache: dict[str, Part] = {}
        under_way = None
        for shard in shards_of(leaf.value):
            part = reader.rows(name, shard.start, shard.stop, cache)
            # one shard is written while the next one is read
            if under_way is not None:
                under_way.get_value()
            # the loop reads the next shard from disk while this shard is sent
            under_way = shard.start_writing(part)
        if under_way is not None:
            under_way.get_value()
    elif isinstance(leaf.value, np.ndarray):
        leaf.value[...] = reader.whole(name)
    elif leaf.put is not None:
        leaf.put(reader.whole(name)[()] if leaf.is_array else reader.manifest.values[name])


def _listed(names: Collection[str]) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:8])) + (
        f" and {len(names) - 8} others" if len(names) > 8 else ""
    )
