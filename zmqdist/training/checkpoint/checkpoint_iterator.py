"""The checkpoints of a directory: which are there, and waiting for the next one.

A directory holds folders `ckpt-<number>`, and a file FINISHED when no more will come. The latest one is the one that was saved last,
whatever its number: after a return to an earlier step the numbers go on from there.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator

from zmqdist.data import storage
from zmqdist.errors import NotFoundError, OpError
from zmqdist.limits import CHECKPOINT_POLL_S
from zmqdist.training.checkpoint.manifest import Manifest

log = logging.getLogger("zmqdist.checkpoint")

FINISHED = "FINISHED"


def path_of(directory: str, number: int) -> str:
    """The folder of a checkpoint."""
    return storage.join(directory, f"ckpt-{number}")


def number_of(path: str) -> int | None:
    """The number in a folder's name; None for another folder."""
    found = re.fullmatch(r"(?:.*/)?ckpt-(\d+)", path, re.ASCII | re.DOTALL)
    return None if found is None else int(found[1])


def checkpoints(directory: str | os.PathLike[str]) -> list[tuple[str, Manifest]]:
    """Path and manifest of each complete checkpoint, the one that was saved last at the end. A damaged one is left out, and logged."""
    found = []
    directory = storage.absolute(directory)
    for name in storage.names(directory):
        path = storage.join(directory, name)
        if number_of(name) is None:
            continue
        try:
            found.append((path, Manifest.read(path)))
        except NotFoundError:  # not finished, or just deleted
            continue
        except OpError as error:
            log.warning("left out: %s", error)
    return sorted(found, key=lambda each: (each[1].serial, number_of(each[0])))


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The complete checkpoint that was saved last; None where there is none."""
    found = checkpoints(directory)
    return found[-1][0] if found else None


def checkpoints_iterator(
    directory: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Each new checkpoint of a directory, as it comes; those that came while one was worked on are passed over, but for the latest.

    It ends when the training has said that it is over (`CheckpointManager.finish`) and the last checkpoint was given.

    A checkpoint may be deleted before it is read: `restore` then raises NotFoundError, and the next one is to be taken.

    Args:
      directory: need not be there yet.
      min_interval_secs: seconds between one and the next, at least.
      timeout: seconds to wait for a new one; None for ever.
      timeout_fn: called when that time is over: whether to end. None: it ends.
    """
    directory = storage.absolute(directory)
    last: tuple[str, int] | None = None
    waiting_since = time.monotonic()
    while True:
        finished = storage.exists(storage.join(directory, FINISHED))  # before looking: what is seen then is the last
        found = checkpoints(directory)
        latest = (found[-1][0], found[-1][1].serial) if found else None
        now = time.monotonic()
        if latest is not None and latest != last:
            last, yielded_at = latest, now
            yield latest[0]
            time.sleep(max(0.0, yielded_at + min_interval_secs - time.monotonic()))
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
