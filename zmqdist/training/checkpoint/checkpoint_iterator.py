"""Lists the checkpoints of a directory, and waits for the next one.

A directory contains folders `ckpt-<number>`. It also contains a file FINISHED when no further
checkpoint will follow. The latest checkpoint is the checkpoint that was saved last. It need not
have the highest number, because a program may return to an earlier step and count on from there.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator

from zmqdist import clock as time
from zmqdist.clock import duration, seconds
from zmqdist.data import storage
from zmqdist.errors import NotFoundError, OpError
from zmqdist.field_types import checked
from zmqdist.limits import CHECKPOINT_POLL_S
from zmqdist.training.checkpoint.manifest import MANIFEST, Manifest

log = logging.getLogger("zmqdist.checkpoint")

FINISHED = "FINISHED"


def path_of(directory: str, number: int) -> str:
    """Return the path of the folder of a checkpoint."""
    return storage.join(directory, f"ckpt-{number}")


def number_of(path: str) -> int | None:
    """Return the number in the name of a checkpoint's folder, or None for any other name."""
    match = re.fullmatch(r"(?:.*/)?ckpt-(\d+)", path, re.ASCII | re.DOTALL)
    return None if match is None else int(match[1])


def checkpoints(directory: str | os.PathLike[str]) -> list[tuple[str, Manifest]]:
    """Return (path, manifest) of each complete checkpoint, in the order in which they were saved. A
    checkpoint whose manifest is damaged is skipped and logged.
    """
    manifests = []
    directory = storage.absolute(directory)
    for name in storage.list_names(directory):
        path = storage.join(directory, name)
        if number_of(name) is None:
            continue
        try:
            manifests.append((path, Manifest.read(path)))
        except NotFoundError:
            # leave out a checkpoint that is unfinished, or was deleted since the folder was listed
            continue
        except OpError as error:
            log.warning("a checkpoint is skipped: %s", error)
    return sorted(manifests, key=lambda item: (item[1].serial, number_of(item[0])))


@checked
def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the complete checkpoint that a manager has saved last. If there is none,
    return that of the checkpoint of another name that was written last, or None.

    >>> checkpoint, place = zd.checkpoint.Checkpoint(epoch=4), f"{folder}/run-of-latest"
    >>> path = zd.checkpoint.CheckpointManager(checkpoint, place, 3).save(1)
    >>> zd.checkpoint.latest_checkpoint(place) == path
    True
    """
    manifests = checkpoints(directory)
    if manifests:
        return manifests[-1][0]
    directory = storage.absolute(directory)
    paths = [storage.join(directory, name) for name in storage.list_names(directory)]
    others = [path for path in paths if storage.exists(storage.join(path, MANIFEST))]
    # times at a URL differ in meaning
    return max(
        others,
        key=lambda path: 0 if "://" in path else os.stat(storage.join(path, MANIFEST)).st_mtime_ns,
        default=None,
    )


@checked
def checkpoints_iterator(
    directory: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yield the path of each new checkpoint of a directory. If several checkpoints appear while the
    caller works on a checkpoint, only the latest of them is yielded. Between checkpoints the
    iterator blocks and polls the directory.

    >>> checkpoint, place = zd.checkpoint.Checkpoint(epoch=4), f"{folder}/run-of-iterator"
    >>> _ = zd.checkpoint.CheckpointManager(checkpoint, place, 3).save(1)
    >>> [path[-6:] for path in zd.checkpoint.checkpoints_iterator(place, timeout=0)]
    ['ckpt-1']

    The iterator ends when training has finished (`CheckpointManager.finish`) and the last
    checkpoint was yielded.

    A checkpoint may be deleted before the caller reads it. Then `restore` raises NotFoundError, and
    the caller should continue with the next checkpoint.

    Args:
      directory: the directory, which need not exist yet.
      min_interval_secs: minimum time between two yielded checkpoints, in seconds.
      timeout: how long to wait for a new checkpoint, in seconds. None waits for ever.
      timeout_fn: a function that the iterator calls after each timeout. If the function returns
        True, the iterator ends. None means that the first timeout ends the iterator.
    """
    interval_s = duration("min_interval_secs", min_interval_secs)
    return _new_checkpoints(storage.absolute(directory), interval_s, seconds(timeout), timeout_fn)


def _new_checkpoints(
    directory: str, interval_s: float, timeout: float | None, timeout_fn: Callable[[], bool] | None
) -> Iterator[str]:
    last: tuple[str, int] | None = None
    waiting_since = time.monotonic()
    while True:
        # Look for FINISHED before listing: no checkpoint is saved after FINISHED, so the list then
        # includes the last checkpoint.
        finished = storage.exists(storage.join(directory, FINISHED))
        manifests = checkpoints(directory)
        latest = (manifests[-1][0], manifests[-1][1].serial) if manifests else None
        now = time.monotonic()
        if latest is not None and latest != last:
            last, yielded_at = latest, now
            yield latest[0]
            time.sleep(max(0.0, yielded_at + interval_s - time.monotonic()))
            waiting_since = time.monotonic()
        elif finished:
            return
        elif timeout is not None and now >= waiting_since + timeout:
            if timeout_fn is None or timeout_fn():
                return
            waiting_since = now
        else:
            left = CHECKPOINT_POLL_S if timeout is None else waiting_since + timeout - now
            time.sleep(min(CHECKPOINT_POLL_S, left))
