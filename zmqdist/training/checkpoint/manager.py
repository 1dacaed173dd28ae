"""`CheckpointManager`: saves checkpoints to a directory and keeps the last few. It saves on demand,
every N steps, or periodically.

Promises
    1. A crash at any moment leaves the last complete checkpoint, because an old checkpoint is
       deleted only after a newer checkpoint is complete and on disk.
    2. An error of periodic saving is logged at once, and the next save, restore or `close` raises
       it. Periodic saving continues.
    3. No periodic save runs after `close` has returned, and no save of the manager runs while it
       restores a checkpoint.

One manager at a time may write to a directory, because it removes unfinished checkpoints there. Any
number of programs may read.

Not here: how one checkpoint is written (writer.py) and restored (save_restore.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable
from operator import index
from types import TracebackType
from typing import Any, SupportsIndex

from zmqdist.clock import number
from zmqdist.data import storage
from zmqdist.field_types import checked, converted
from zmqdist.training.checkpoint.checkpoint_iterator import (
    FINISHED,
    checkpoints,
    number_of,
    path_of,
)
from zmqdist.training.checkpoint.manifest import MANIFEST
from zmqdist.training.checkpoint.objects import Checkpoint, check_options
from zmqdist.training.checkpoint.save_restore import restore, save_numbered, whole

log = logging.getLogger("zmqdist.checkpoint")

_UNFINISHED = re.compile(r"ckpt-\d+\.[0-9a-f]{8}" + re.escape(storage.TMP), re.ASCII)


@checked
class CheckpointManager:
    """Saves, restores and deletes the checkpoints of one directory. Threads may share a manager. A
    with-statement closes the manager.

    >>> checkpoint = zd.checkpoint.Checkpoint(epoch=0)
    >>> manager = zd.checkpoint.CheckpointManager(checkpoint, f"{folder}/run", max_to_keep=3)
    >>> manager.restore_or_initialize() is None
    True
    >>> manager.save(1).endswith("ckpt-1")
    True

    Attributes:
      checkpoint: the argument of this name.
      directory: the absolute path of the directory.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 3,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: SupportsIndex | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
    ) -> None:
        """Start periodic saving if `every_s` is given. The constructor itself saves and restores
        nothing.

        Args:
          checkpoint: a Checkpoint, or any structure that `zmqdist.checkpoint.save` accepts.
          directory: the directory, which is made when the first checkpoint is saved.
          max_to_keep: number of checkpoints to keep. None means that all checkpoints are kept.
          keep_checkpoint_every_n_hours, checkpoint_name: no other values than the defaults are
            accepted. For checkpoints that stay, pass the directory to another manager.
          step_counter: a variable with the number of the step, which `save` reads if no number is
            passed to it.
          checkpoint_interval: the same as `every_steps`; also `save` without a number then saves
            only when so many steps have passed. Needs a `step_counter`.
          init_fn: a function that `restore_or_initialize` calls if there is no checkpoint.
          every_s: a background thread saves at intervals of this many seconds. None means no
            periodic saving.
          every_steps: `maybe_save` saves when at least this many steps have passed since the last
            save. None means that `maybe_save` never saves.

        Raises:
          ValueError: a number is not positive, `checkpoint_interval` has no `step_counter` or is
            passed together with `every_steps`, or a value is not accepted.
        """
        for name, value in (
            ("max_to_keep", max_to_keep),
            ("every_s", every_s),
            ("every_steps", every_steps),
            ("checkpoint_interval", checkpoint_interval),
        ):
            if value is not None and not number(value) > 0:
                raise ValueError(f"{name} is {value!r}, wants a positive number or None")
        if keep_checkpoint_every_n_hours is not None:
            raise ValueError(
                "keep_checkpoint_every_n_hours: max_to_keep alone decides which checkpoints stay; "
                "save those that shall stay to another directory"
            )
        if checkpoint_name != "ckpt":
            raise ValueError(
                f"checkpoint_name: checkpoints are called ckpt-N, not {checkpoint_name!r}"
            )
        if checkpoint_interval is not None and (step_counter is None or every_steps is not None):
            raise ValueError("checkpoint_interval needs a step_counter, and replaces every_steps")
        self.checkpoint = checkpoint
        self.directory = storage.absolute(directory)
        self._max_to_keep = max_to_keep
        self._every_s = every_s
        self._every_steps = every_steps if checkpoint_interval is None else checkpoint_interval
        self._checkpoint_interval = checkpoint_interval
        self._step_counter = step_counter
        if step_counter is not None:
            converted("step_counter", index, step_counter)
        self._init_fn = init_fn
        self._lock = threading.RLock()
        self._step: int | None = None
        self._saved_step: int | None = None
        self._tidied = False
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if every_s is not None:
            self._thread = threading.Thread(
                target=self._run, name="zmqdist-checkpoints", daemon=True
            )
            self._thread.start()

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, the oldest first."""
        return [path for path, _ in checkpoints(self.directory)]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the checkpoint that was saved last, or None if there is no checkpoint."""
        return next(reversed(self.checkpoints), None)

    def save(
        self,
        step: SupportsIndex | None = None,
        check_interval: bool = True,
        options: Any = None,
        *,
        checkpoint_number: SupportsIndex | None = None,
    ) -> str | None:
        """Save as `ckpt-<step>`, and delete the oldest checkpoints beyond `max_to_keep`. Blocks
        until the checkpoint is on disk.

        >>> checkpoint = zd.checkpoint.Checkpoint(epoch=0)
        >>> manager = zd.checkpoint.CheckpointManager(checkpoint, f"{folder}/run-of-save", 3)
        >>> manager.save(1).endswith("ckpt-1")
        True

        Args:
          step, checkpoint_number: an integer of Python or NumPy, or a variable that holds an
            integer; two names of one argument. None means the value of `step_counter`, or else the
            highest number in the directory + 1. An existing checkpoint with the number `step` is
            replaced.
          check_interval: whether `checkpoint_interval` may keep `save` from saving.

        Returns:
          The path of the checkpoint. None if fewer than `checkpoint_interval` steps have passed
          since the last save.

        Raises:
          The errors of `zmqdist.checkpoint.save`, and the error of an earlier periodic save.
        """
        check_options(options)
        if checkpoint_number is not None:
            step = checkpoint_number
        if step is None:
            step = self._step_counter
            if step is not None and check_interval and self._checkpoint_interval is not None:
                return self.maybe_save(step)
        self._raise()
        return self._save(None if step is None else whole(step))

    def maybe_save(self, step: SupportsIndex) -> str | None:
        """Record the current step. Save if at least `every_steps` steps have passed since the last
        save, or if `step` is below the last saved step. A save without a step does not count.
        Return the path of the checkpoint, or None if none was saved.

        >>> checkpoint, place = zd.checkpoint.Checkpoint(epoch=0), f"{folder}/run-of-maybe"
        >>> manager = zd.checkpoint.CheckpointManager(checkpoint, place, 3, every_steps=10)
        >>> [manager.maybe_save(step) is not None for step in (0, 5, 10)]
        [False, False, True]

        Raises:
          As `save`.
        """
        self._raise()
        number = whole(step)
        with self._lock:
            if self._saved_step is None:
                self._saved_step = number_of(self.latest_checkpoint or "")
            self._step = number
            since = number - (self._saved_step or 0)
            if self._every_steps is None or 0 <= since < self._every_steps:
                return None
            return self._save(number)

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint and return its path. If there is no checkpoint, call
        `init_fn` and return None.

        >>> checkpoint, place = zd.checkpoint.Checkpoint(epoch=4), f"{folder}/run-of-restore"
        >>> _ = zd.checkpoint.CheckpointManager(checkpoint, place, 3).save(1)
        >>> again = zd.checkpoint.Checkpoint(epoch=0)
        >>> _ = zd.checkpoint.CheckpointManager(again, place, 3).restore_or_initialize()
        >>> again.epoch
        4

        Raises:
          As `zmqdist.checkpoint.restore`, and the error of an earlier periodic save.
        """
        self._raise()
        with self._lock:
            path = self.latest_checkpoint
            if path is not None:
                if isinstance(self.checkpoint, Checkpoint):
                    self.checkpoint.restore(path)
                else:
                    restore(path, self.checkpoint)
                # Forget the program's step until the next `maybe_save`, because the step belongs to
                # values that this restore has replaced.
                self._step, self._saved_step = None, number_of(path)
            elif self._init_fn is not None:
                self._init_fn()
            return path

    def finish(self) -> None:
        """Close the manager, and mark the directory as finished. The `checkpoints_iterator` of a
        program that waits for a new checkpoint then ends.

        >>> checkpoint, place = zd.checkpoint.Checkpoint(epoch=4), f"{folder}/run-of-finish"
        >>> manager = zd.checkpoint.CheckpointManager(checkpoint, place, 3)
        >>> _ = manager.save(1)
        >>> manager.finish()
        >>> len(list(zd.checkpoint.checkpoints_iterator(place)))
        1
        """
        self.close()
        storage.make_folder(self.directory)
        storage.write(storage.join(self.directory, FINISHED), b"")
        # the next save must tidy the directory, which removes the FINISHED mark
        self._tidied = False

    def close(self) -> None:
        """Stop periodic saving, and wait until a periodic save in progress has ended. A second call
        does nothing.

        >>> checkpoint, place = zd.checkpoint.Checkpoint(epoch=4), f"{folder}/run-of-close"
        >>> manager = zd.checkpoint.CheckpointManager(checkpoint, place, 3, every_s=600)
        >>> manager.close()

        Raises:
          The error of a periodic save that no call has raised yet.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # Suppress the error of a periodic save, which was logged before, because it must not
            # replace the error of the with-statement.
            with contextlib.suppress(Exception):
                self.close()

    def _save(self, step: int | None) -> str:
        with self._lock:
            # promise 3: a restore also holds this lock, so that no save runs during a restore
            self._tidy()
            existing = checkpoints(self.directory)
            number = (
                1 + max([number_of(path) or 0 for path, _ in existing], default=0)
                if step is None
                else step
            )
            serial = 1 + max([manifest.serial for _, manifest in existing], default=0)
            path = save_numbered(path_of(self.directory, number), self.checkpoint, number, serial)
            if step is not None:
                self._step = self._saved_step = step
            if self._max_to_keep is not None:
                older = [older_path for older_path, _ in existing if older_path != path]
                for older_path in older[: max(0, len(older) + 1 - self._max_to_keep)]:
                    _delete(older_path)
            return path

    def _tidy(self) -> None:
        """Prepare the directory before the first save: remove unfinished checkpoints of a killed
        manager, and the FINISHED mark."""
        if self._tidied:
            return
        try:
            storage.make_folder(self.directory)
        except OSError as error:
            raise storage.error_of(error, self.directory) from error
        with contextlib.suppress(FileNotFoundError):
            storage.remove(storage.join(self.directory, FINISHED))
        for name in storage.list_names(self.directory, unfinished=True):
            path = storage.join(self.directory, name)
            cut_off = number_of(name) is not None and not storage.exists(
                storage.join(path, MANIFEST)
            )
            if cut_off or _UNFINISHED.fullmatch(name):
                storage.remove_tree(path)
        self._tidied = True

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                with self._lock:
                    self._save(self._step)
            except BaseException as error:
                log.error(
                    "a periodic checkpoint in %s failed; the next one follows in %s s: %s",
                    self.directory,
                    self._every_s,
                    error,
                )
                self._error = error


def _delete(path: str) -> None:
    """Delete a checkpoint. Delete its manifest first, so that a crash in between leaves no folder
    that looks like a checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        storage.remove(storage.join(path, MANIFEST))
    storage.remove_tree(path)
