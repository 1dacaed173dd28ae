"""`Checkpoint`: what belongs together, as attributes, and restored also when it is only made later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, SupportsIndex

from zmqdist.training.checkpoint.reader import CheckpointReader
from zmqdist.training.checkpoint.save_restore import fill, save
from zmqdist.training.checkpoint.structure import Container, containers, leaves


@dataclass(frozen=True)
class _Source:
    """What an object is restored from.

    Attributes:
      prefix: of the names of its parts in the checkpoint.
      used: names that were restored already; shared by all objects of one `restore`.
    """

    reader: CheckpointReader
    prefix: str
    used: set[str]


class Checkpoint(Container):
    """Variables and whatever else is saved, as attributes: `Checkpoint(model={"w": w}, epoch=0)`.

    An attribute may be all that `save` takes, and another Checkpoint. Names that begin with an underscore are not saved. A class
    of models may be a subclass, whose attributes then are its variables.

    After `restore`, what is set as an attribute for the first time is restored at that moment, if the checkpoint holds it.
    """

    _source: _Source | None = None

    def __init__(self, **objects: Any) -> None:
        for name, value in objects.items():
            setattr(self, name, value)

    def save(self, path: str | os.PathLike[str], *, step: SupportsIndex | None = None) -> str:
        """Write a checkpoint of all attributes. As `zmqdist.checkpoint.save`."""
        return save(path, self, step=step)

    def restore(self, path: str | os.PathLike[str] | None) -> Checkpoint:
        """Put back what the checkpoint holds of the attributes, now and later; the rest of them stays as it is.

        With None there is nothing to restore, as with `latest_checkpoint` of an empty directory. Errors are those of
        `zmqdist.checkpoint.restore`, and here what is refused has changed nothing, either.

        Returns:
          Itself, for `restore(...).assert_consumed()`.
        """
        if path is None:
            self._source = None
        else:
            self._take(_Source(CheckpointReader(path), "", set()), self)
        return self

    def assert_existing_objects_matched(self) -> Checkpoint:
        """Raises AssertionError: something that is here now was not restored; it is not in the checkpoint, or came too late."""
        source = self._restored_from()
        missing = [name for name in leaves(self) if source.prefix + name not in source.used]
        if missing:
            raise AssertionError(f"not restored from {source.reader.path}: {', '.join(sorted(missing))}")
        return self

    def assert_consumed(self) -> Checkpoint:
        """As `assert_existing_objects_matched`; AssertionError also if the checkpoint holds what nothing here took."""
        source = self.assert_existing_objects_matched()._restored_from()
        names = [name for name in source.reader.manifest.names if name.startswith(source.prefix)]
        left = [name for name in names if name not in source.used]
        if left:
            raise AssertionError(f"in {source.reader.path}, and nothing here took it: {', '.join(left)}")
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._source is not None and not name.startswith("_"):
            held = {name: value}
            self._take(self._source, held)
            value = held[name]
        object.__setattr__(self, name, value)

    def _parts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _restored_from(self) -> _Source:
        if self._source is None:
            raise AssertionError("nothing was restored: no checkpoint was given")
        return self._source

    def _take(self, source: _Source, structure: Any) -> None:
        """Restore what the source has for a structure and has not been taken yet; objects in it go on from there."""
        available = set(source.reader.manifest.names) - source.used
        found = {
            source.prefix + name: leaf for name, leaf in leaves(structure).items() if source.prefix + name in available
        }
        fill(source.reader, found)
        source.used.update(found)
        for name, container in containers(structure):
            container._source = _Source(
                source.reader, f"{source.prefix}{name}/" if name else source.prefix, source.used
            )
