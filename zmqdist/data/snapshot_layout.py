"""What is where in the folder of a distributed snapshot: names, and how they are read back.

<path>/
  snapshot.metadata                             JSON: version, compression, spec, positions of each source
  dataset_spec.json, dataset_def.json           the spec of the elements; the pipeline
  DONE | ERROR                                  it is whole | {"code": ..., "message": ...}
  chunks/chunk_<stream>_<index>_<elements>      what readers read: see chunks.py
  streams/stream_<i>/
    owner_worker                                who writes it: an address
    DONE | ERROR
    splits/source_<s>/repetition_<r>/split_<local>_<global>
    uncommitted_chunks/<life>/                  what the writer works on; each life of a writer has a folder of its own
    checkpoints/checkpoint_<index>_<elements>   where the writer goes on: before chunk <index>

A file of a split tells a run of positions that was handed out in one piece: those from <global> on, of which the first is the
stream's number <local> in that repetition; how many stands in the file, nothing in it says one.
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
    """A committed file of elements; sorted as readers read them."""

    index: int
    stream: int
    count: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"chunk_{self.stream}_{self.index}_{self.count}"

    @classmethod
    def of(cls, name: str) -> CommittedChunk | None:
        """None for another file."""
        found = re.fullmatch(r"chunk_(\d+)_(\d+)_(\d+)", name, re.ASCII)
        return found and cls(int(found[2]), int(found[1]), int(found[3]))


def snapshot_done_path(path: str) -> str:
    """The file whose presence says that a snapshot is whole."""
    return storage.join(path, "DONE")


def snapshot_error_path(path: str) -> str:
    """The file that says why a snapshot failed."""
    return storage.join(path, "ERROR")


def chunks_path(path: str) -> str:
    """The folder of a snapshot's committed chunks."""
    return storage.join(path, "chunks")


def stream_path(path: str, stream: int) -> str:
    """The folder of a stream. Its DONE and ERROR have the names of the snapshot's own: give it to the functions above."""
    return storage.join(path, "streams", f"stream_{stream}")


def splits_path(path: str, stream: int, source: int, repetition: int) -> str:
    """The folder of what was handed out to a stream in one repetition of a source."""
    return storage.join(stream_path(path, stream), "splits", f"source_{source}", f"repetition_{repetition}")


def committed(path: str) -> list[CommittedChunk]:
    """The chunks of a snapshot so far, as readers read them: first chunks of all streams, then second ones."""
    found = (CommittedChunk.of(name) for name in storage.names(chunks_path(path)))
    return sorted(chunk for chunk in found if chunk is not None)


def write_json(path: str, value: Any, by: str | None = None) -> None:
    """Make a file of JSON in one step; `by` as in `storage.write`."""
    storage.write(path, json.dumps(value).encode(), by)


def read_error(path: str) -> OpError | None:
    """What the ERROR of a snapshot or a stream says; None where there is none."""
    try:
        content = json.loads(storage.read(snapshot_error_path(path)))
        return from_code(int(content["code"]), str(content["message"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        return UnknownError(f"{snapshot_error_path(path)} says that writing failed, but not why")


def write_error(path: str, error: OpError, by: str | None = None) -> None:
    """Leave an ERROR with a snapshot or a stream."""
    write_json(snapshot_error_path(path), {"code": error.error_code, "message": str(error)}, by)
