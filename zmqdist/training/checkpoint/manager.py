"""`CheckpointManager`: the last few checkpoints of a directory, saved when asked, by the step, or by the clock.

Promises
    1. A crash at any moment leaves the last complete checkpoint: an older one goes only when a newer one is whole and on the disk.
    2. An error of periodic saving is logged at once and raised by the next call, once. Saving goes on at its time.
    3. Nothing is saved after `close` has returned, or while something is being restored.

One manager at a time writes to a directory: it removes what a killed one has left unfinished there. Any number of programs may read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from types import TracebackType
from typing import Any, SupportsIndex

from zmqdist.data import storage
from zmqdist.training.checkpoint.checkpoint_iterator import FINISHED, checkpoints, number_of, path_of
from zmqdist.training.checkpoint.manifest import MANIFEST
from zmqdist.training.checkpoint.objects import Checkpoint
from zmqdist.training.checkpoint.save_restore import restore, save_numbered, whole

log = logging.getLogger("zmqdist.checkpoint")

_UNFINISHED = re.compile(r"ckpt-\d+\.[0-9a-f]{8}" + re.escape(storage.TMP), re.ASCII)


class CheckpointManager:
    """See the module's docstring. Threads may share it; `with` closes it."""

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 3,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
    ) -> None:
        """Begin; nothing is saved or restored yet.

        Args:
          checkpoint: a Checkpoint, or what `zmqdist.checkpoint.save` takes.
          directory: is made when the first one is saved.
          max_to_keep: None for all.
          every_s: save in the background, with so many seconds between one and the next.
          every_steps: how many steps lie between what `maybe_save` saves.

        Raises:
          ValueError: a number is not positive.
        """
        for name, value in (("max_to_keep", max_to_keep), ("every_s", every_s), ("every_steps", every_steps)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}, wants a positive number or None")
        self._checkpoint = checkpoint
        self._directory = storage.absolute(directory)
        self._max_to_keep = max_to_keep
        self._every_s = every_s
        self._every_steps = every_steps
        self._lock = threading.RLock()
        self._step: int | None = None
        self._saved_step: int | None = None
        self._tidied = False
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if every_s is not None:
            self._thread = threading.Thread(target=self._run, name="zmqdist-checkpoints", daemon=True)
            self._thread.start()

    @property
    def directory(self) -> str:
        """The absolute path."""
        return self._directory

    @property
    def checkpoint(self) -> Any:
        """What is saved and restored, as it was given."""
        return self._checkpoint

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete ones, the oldest first."""
        return [path for path, _ in checkpoints(self._directory)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The one that was saved last; None where there is none."""
        return next(reversed(self.checkpoints), None)

    def save(self, step: SupportsIndex | None = None) -> str:
        """Save as `ckpt-<step>`, and delete the oldest when there are too many.

        Args:
          step: a whole number of Python or NumPy, or a variable that is one; None: the number after the last one. One that is there is
            replaced.

        Returns:
          The path.

        Raises:
          As `zmqdist.checkpoint.save`, and the error of a periodic one before.
        """
        self._raise()
        return self._save(None if step is None else whole(step))

    def maybe_save(self, step: SupportsIndex) -> str | None:
        """Tell the step, and save when `every_steps` have passed since the last one was saved; the path then.

        Raises:
          As `save`.
        """
        self._raise()
        number = whole(step)
        with self._lock:
            if self._saved_step is None:
                self._saved_step = self._step_of_latest()
            self._step = number
            since = number - (self._saved_step or 0)
            if self._every_steps is None or 0 <= since < self._every_steps:
                return None
            return self._save(number)

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint; its path, or None where there is none and everything stays as it is.

        Raises:
          As `zmqdist.checkpoint.restore`.
        """
        self._raise()
        with self._lock:
            path = self.latest_checkpoint
            if path is not None:
                if isinstance(self._checkpoint, Checkpoint):
                    self._checkpoint.restore(path)
                else:
                    restore(path, self._checkpoint)
                self._step = self._saved_step = number_of(path)
            return path

    def finish(self) -> None:
        """Say that no more will come, so that evaluators that wait for a new one end; then `close`."""
        self.close()
        storage.make_folder(self._directory)
        storage.write(storage.join(self._directory, FINISHED), b"")
        self._tidied = False  # whoever saves after all takes the mark away

    def close(self) -> None:
        """End periodic saving, after one that is under way. May be called again.

        Raises:
          The error of a periodic one that was not raised yet.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(Exception):  # was logged; the error that is under way is the one to be seen
                self.close()

    def _save(self, step: int | None) -> str:
        with self._lock:
            self._tidy()
            existing = checkpoints(self._directory)
            if step is None:
                step = 1 + max([number_of(path) or 0 for path, _ in existing], default=0)
            serial = 1 + max([manifest.serial for _, manifest in existing], default=0)
            path = save_numbered(path_of(self._directory, step), self._checkpoint, step, serial)
            self._step = self._saved_step = step
            if self._max_to_keep is not None:
                older = [each for each, _ in existing if each != path]
                for each in older[: max(0, len(older) + 1 - self._max_to_keep)]:
                    _delete(each)
            return path

    def _tidy(self) -> None:
        """Once: what a killed manager has left unfinished goes, and so does the word that no more will come."""
        if self._tidied:
            return
        try:
            storage.make_folder(self._directory)
        except OSError as error:
            raise storage.error_of(error, self._directory) from error
        with contextlib.suppress(FileNotFoundError):
            storage.remove(storage.join(self._directory, FINISHED))
        for name in storage.names(self._directory, unfinished=True):
            path = storage.join(self._directory, name)
            cut_off = number_of(name) is not None and not storage.exists(storage.join(path, MANIFEST))
            if cut_off or _UNFINISHED.fullmatch(name):
                storage.remove_tree(path)
        self._tidied = True

    def _step_of_latest(self) -> int | None:
        path = self.latest_checkpoint
        return None if path is None else number_of(path)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                with self._lock:
                    self._save(self._step if self._step != self._saved_step else None)
            except BaseException as error:
                log.error("periodic checkpoint in %s failed: %s", self._directory, error)
                self._error = error


def _delete(path: str) -> None:
    """Delete a checkpoint: without its manifest it is none any more, whatever happens next."""
    with contextlib.suppress(FileNotFoundError):
        storage.remove(storage.join(path, MANIFEST))
    storage.remove_tree(path)
