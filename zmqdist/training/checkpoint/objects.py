"""`Checkpoint`: an object whose attributes are saved and restored together. An attribute that the
program first sets after the restore is restored at that moment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

from zmqdist.field_types import checked
from zmqdist.training.checkpoint.reader import CheckpointReader
from zmqdist.training.checkpoint.save_restore import fill, save
from zmqdist.training.checkpoint.structure import Container, containers, leaves


def check_options(options: Any) -> None:
    """Raise ValueError for the options of TensorFlow's checkpoints."""
    if options is not None:
        raise ValueError(
            f"options: a checkpoint is written in one way only: leave {type(options).__name__} out"
        )


@dataclass(frozen=True)
class _Source:
    """The checkpoint from which an object is restored.

    Attributes:
      reader: the reader of the checkpoint.
      prefix: prefix of the names that the object's attributes have in the checkpoint.
      used: names of the entries that have been restored. All objects of one `restore` share this
        set.
    """

    reader: CheckpointReader
    prefix: str
    used: set[str]


@checked
class Checkpoint(Container):
    """Variables and other values that are saved together, as attributes: `Checkpoint(model={"w":
    w}, epoch=0)`.

    >>> checkpoint = zd.checkpoint.Checkpoint(weights=zd.Variable([1.0, 2.0]), epoch=1)
    >>> path = checkpoint.save(f"{folder}/objects")
    >>> checkpoint.epoch = 5
    >>> checkpoint.restore(path).epoch
    1

    An attribute may be any value that `save` accepts, including another Checkpoint. Attributes with
    a leading underscore are not saved. If your model's class is a subclass of Checkpoint, its
    attributes are saved.

    After `restore`, an attribute that is set for the first time is restored at that moment, if the
    checkpoint holds it.
    """

    _source: _Source | None = None
    _root: Any = None

    if TYPE_CHECKING:  # for the attributes that a program chooses

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, root: Any = None, **objects: Any) -> None:
        """Set the attributes `objects`.

        Args:
          root: a variable, or a dict, list or Checkpoint, whose items are saved beside the
            attributes, under their own names.
        """
        self._root = root
        for name, value in objects.items():
            setattr(self, name, value)

    def save(
        self,
        path: str | os.PathLike[str],
        options: Any = None,
        *,
        step: SupportsIndex | None = None,
    ) -> str:
        """Write a checkpoint of all attributes to `path`, as `zmqdist.checkpoint.save` does. No
        number is appended to `path`: a CheckpointManager numbers checkpoints.

        >>> path = zd.checkpoint.Checkpoint(epoch=1).save(f"{folder}/by-save")
        >>> zd.checkpoint.load(path)
        {'epoch': 1}

        `write` and `read` are other names of `save` and `restore`. `options` is None, because a
        checkpoint is written in one way only.
        """
        check_options(options)
        return save(path, self, step=step)

    write = save

    def restore(self, path: str | os.PathLike[str] | None, options: Any = None) -> Checkpoint:
        """Restore the attributes that the checkpoint holds. Existing attributes are restored at
        once, and other attributes when they are set. Attributes that the checkpoint does not hold
        stay unchanged.

        >>> path = zd.checkpoint.save(f"{folder}/by-restore", {"epoch": 4})
        >>> zd.checkpoint.Checkpoint(epoch=0).restore(path).epoch
        4

        If `path` is None, as `latest_checkpoint` returns it for an empty directory, nothing is
        restored. Raises the errors of `zmqdist.checkpoint.restore`. If the checkpoint is refused,
        no attribute has changed.

        Returns:
          This object, for `restore(...).assert_consumed()`.
        """
        check_options(options)
        if path is None:
            self._source = None
        else:
            self._take(_Source(CheckpointReader(path), "", set()), self)
        return self

    read = restore

    def expect_partial(self) -> Checkpoint:
        """Return this object. A checkpoint may hold entries that no attribute takes.

        >>> path = zd.checkpoint.save(f"{folder}/partial", {"epoch": 4, "rate": 0.1})
        >>> zd.checkpoint.Checkpoint(epoch=0).restore(path).expect_partial().epoch
        4
        """
        return self

    def assert_nontrivial_match(self) -> Checkpoint:
        """Raise AssertionError if nothing was restored. Return this object.

        >>> path = zd.checkpoint.save(f"{folder}/nontrivial", {"epoch": 4, "rate": 0.1})
        >>> _ = zd.checkpoint.Checkpoint(epoch=0).restore(path).assert_nontrivial_match()
        """
        source = self._restored_from()
        if not source.used:
            raise AssertionError(f"nothing was restored from {source.reader.path}: no name matches")
        return self

    def assert_existing_objects_matched(self) -> Checkpoint:
        """Raise AssertionError if an attribute was not restored because the checkpoint does not
        hold it, or if there was no checkpoint. Return this object.

        >>> path = zd.checkpoint.save(f"{folder}/matched", {"epoch": 4, "rate": 0.1})
        >>> restored = zd.checkpoint.Checkpoint(epoch=0).restore(path)
        >>> _ = restored.assert_existing_objects_matched()
        """
        source = self._restored_from()
        missing = [name for name in leaves(self) if source.prefix + name not in source.used]
        if missing:
            raise AssertionError(
                f"attributes not restored from {source.reader.path}: {', '.join(sorted(missing))}"
            )
        return self

    def assert_consumed(self) -> Checkpoint:
        """Raise AssertionError if an attribute was not restored, or if the checkpoint holds an
        entry that was restored to no attribute. Return this object.

        >>> path = zd.checkpoint.save(f"{folder}/consumed", {"epoch": 4})
        >>> checkpoint = zd.checkpoint.Checkpoint(epoch=0).restore(path).assert_consumed()
        """
        source = self.assert_existing_objects_matched()._restored_from()
        names = [name for name in source.reader.manifest.names if name.startswith(source.prefix)]
        left = [name for name in names if name not in source.used]
        if left:
            raise AssertionError(
                f"entries of {source.reader.path} restored to no attribute: {', '.join(left)}"
            )
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._source is not None and not name.startswith("_"):
            attribute = {name: value}
            self._take(self._source, attribute)
            value = attribute[name]
        object.__setattr__(self, name, value)

    def _parts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _beside(self) -> Any:
        return () if self._root is None else self._root

    def _restored_from(self) -> _Source:
        if self._source is None:
            raise AssertionError("nothing was restored: no checkpoint was given to restore()")
        return self._source

    def _take(self, source: _Source, structure: Any) -> None:
        """Restore those leaves of a structure that the source has and that were not restored yet.
        Each Checkpoint in the structure gets a source of its own, from which the Checkpoint
        restores attributes that are set later.
        """
        available = set(source.reader.manifest.names) - source.used
        targets = {
            source.prefix + name: leaf
            for name, leaf in leaves(structure).items()
            if source.prefix + name in available
        }
        fill(source.reader, targets)
        source.used.update(targets)
        for name, container in containers(structure):
            container._source = _Source(
                source.reader, f"{source.prefix}{name}/" if name else source.prefix, source.used
            )
