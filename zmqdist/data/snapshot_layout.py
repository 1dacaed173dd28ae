"""The folder of a distributed snapshot: the names of its files, and how to read them.

<path>/
  snapshot.metadata                             JSON: version, compression, spec, positions of each source
  dataset_spec.json, dataset_def.json           the spec of the elements; the pipeline
  DONE | ERROR                                  the snapshot is complete | {"code": ..., "message": ...}
  chunks/chunk_<stream>_<index>_<elements>      committed chunks, which readers read: see chunks.py
  streams/stream_<i>/
    owner_worker                                the address of the worker that writes the stream
    DONE | ERROR
    splits/source_<s>/repetition_<r>/split_<local>_<global>
    uncommitted_chunks/<incarnation>/           chunks that a writer has not committed; each incarnation of a writer has its own folder
    checkpoints/checkpoint_<index>_<elements>   where the writer resumes: before chunk <index>

A split file stands for a run of positions that the stream got in one reply. These are the positions
<global>, <global> + 1, ... of the source, which are the stream's positions <local>, <local> + 1,
... in that repetition. The file contains the number of positions. An empty file means one position.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from zmqdist.data import storage
from zmqdist.errors import OpError, UnknownError, from_code

METADATA = "snapshot.metadata"
VERSION = 1


@dataclass(frozen=True, order=True)
class CommittedChunk:
    """A committed file of elements. `sorted` puts chunks into the order in which readers read them.

    Attributes:
      index: the number of the chunk in its stream, counted from 0.
      count: the number of elements in the file.
    """

    index: int
    stream: int
    count: int

    @property
    def name(self) -> str:
        """The name of the chunk's file."""
        return f"chunk_{self.stream}_{self.index}_{self.count}"

    @classmethod
    def of(cls, name: str) -> CommittedChunk | None:
        """Return the chunk with this file name, or None if no chunk can have this name."""
        match = re.fullmatch(r"chunk_(\d+)_(\d+)_(\d+)", name, re.ASCII)
        return match and cls(int(match[2]), int(match[1]), int(match[3]))


def snapshot_done_path(path: str) -> str:
    """Return the path of the file DONE, which exists when the snapshot is complete."""
    return storage.join(path, "DONE")


def snapshot_error_path(path: str) -> str:
    """Return the path of the file ERROR, which contains the error with which the snapshot has
    failed."""
    return storage.join(path, "ERROR")


def chunks_path(path: str) -> str:
    """Return the folder of a snapshot's committed chunks."""
    return storage.join(path, "chunks")


def stream_path(path: str, stream: int) -> str:
    """Return the folder of a stream. The functions for the paths of DONE and ERROR accept this
    folder too, because a stream has files of these names.
    """
    return storage.join(path, "streams", f"stream_{stream}")


def splits_path(path: str, stream: int, source: int, repetition: int) -> str:
    """Return the folder of the splits that a stream got in one repetition of a source."""
    return storage.join(
        stream_path(path, stream), "splits", f"source_{source}", f"repetition_{repetition}"
    )


def committed_chunks(path: str) -> list[CommittedChunk]:
    """Return the committed chunks in the order in which readers read them: the first chunk of each
    stream, then the second chunk of each stream, and so on.
    """
    chunks = (CommittedChunk.of(name) for name in storage.list_names(chunks_path(path)))
    return sorted(chunk for chunk in chunks if chunk is not None)


def write_json(path: str, value: Any, staging_folder: str | None = None) -> None:
    """Write a file of JSON in one step. `staging_folder` is explained at `storage.write`."""
    storage.write(path, json.dumps(value).encode(), staging_folder)


def read_error(path: str) -> OpError | None:
    """Return the error in the file ERROR of a snapshot or a stream, or None if the file does not
    exist."""
    try:
        content = json.loads(storage.read(snapshot_error_path(path)))
        return from_code(int(content["code"]), str(content["message"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        return UnknownError(
            f"writing failed, and the reason in {snapshot_error_path(path)} cannot be read"
        )


def write_error(path: str, error: OpError, staging_folder: str | None = None) -> None:
    """Write the file ERROR of a snapshot or a stream."""
    write_json(
        snapshot_error_path(path), {"code": error.error_code, "message": str(error)}, staging_folder
    )
