"""`distributed_save`: have a service compute a pipeline once and keep its elements in a folder."""

from __future__ import annotations

import uuid
from math import inf
from typing import Any

from zmqdist.data import storage
from zmqdist.data.chunks import spec_to_json
from zmqdist.data.dataset import Dataset
from zmqdist.data.ops.snapshots import checked_compression
from zmqdist.data.service.client import REGISTER_S, ask_dispatcher
from zmqdist.data.service.service_address import Service, service_of
from zmqdist.errors import from_code


def distributed_save(
    dataset: Dataset, path: str, data_service_address: str, compression: str | None = "AUTO"
) -> SnapshotHandle:
    """Have the workers of a data service write a dataset into a folder, for `Dataset.load`. Returns when the service has begun.

    Each element is computed by one worker. Every worker can reach the folder by the same path. The service goes on when this program
    has ended, and over restarts of dispatcher and workers.

    Args:
      path: a folder that does not exist yet: of a shared file system, or a URL (extra `zmqdist[fsspec]`).
      data_service_address: the dispatcher, "host:port".
      compression: "AUTO" (as "SNAPPY"), "GZIP", "SNAPPY" (quick), "ZLIB" (small) or None.

    Raises:
      ValueError: not an address, or no such compression. InvalidArgumentError: the dataset is infinite; the dispatcher has no journal.
      AlreadyExistsError: the path exists. FailedPreconditionError: its file system has no atomic rename.
      UnimplementedError: the dataset has a source that cannot be dealt out, or elements that cannot be written.
      UnavailableError: no dispatcher answered within an hour.
    """
    if not isinstance(getattr(data_service_address, "target", data_service_address), str):
        raise ValueError(f"`data_service_address` must be a string, but is a {type(data_service_address).__name__}")
    if not data_service_address:
        raise ValueError("`data_service_address` must not be empty")
    checked_compression(compression)
    path, service = storage.absolute(str(path)), service_of(data_service_address)
    description, spec = dataset.serialize(), spec_to_json(dataset.element_spec)
    _ask(path, service, "save", uuid.uuid4().hex, path, description, spec, compression)
    return SnapshotHandle(path, service)


class SnapshotHandle:
    """A snapshot that a service writes. It may be dropped: the service goes on.

    Attributes:
      path: its folder.
    """

    def __init__(self, path: str, service: Service) -> None:
        self.path = path
        self._service = service

    def __repr__(self) -> str:
        return f"<snapshot {self.path} by {self._service.address}>"

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is whole.

        Args:
          timeout: seconds; None: as long as it takes, also over restarts of the dispatcher.

        Raises:
          DeadlineExceededError: `timeout` passed first. What the pipeline raised on a worker; CancelledError: somebody cancelled it.
        """
        code, message = _ask(self.path, self._service, "snapshot_wait", self.path, timeout_s=timeout)
        if code:
            raise from_code(code, message)

    def progress(self) -> dict[str, Any]:
        """How far it is: `state` ("active", "winding down", "done" or "error"), `error`, `streams`, `streams_done`, `chunks` and `elements`
        that are committed, `handed_out` of `positions` of its sources (-1: without end)."""
        return dict(_ask(self.path, self._service, "snapshot_progress", self.path))

    def cancel(self) -> None:
        """End it. What was committed stays, and an ERROR that says so. Harmless when it is over."""
        _ask(self.path, self._service, "snapshot_cancel", self.path)


def _ask(path: str, service: Service, method: str, *args: Any, timeout_s: float | None = REGISTER_S) -> Any:
    """Ask the dispatcher of a service, also over its restarts. Raises UnavailableError where none answers in time."""
    what = f"{method} of {path} at {service.address}"
    return ask_dispatcher(service, method, *args, what=what, timeout_s=inf if timeout_s is None else timeout_s)
