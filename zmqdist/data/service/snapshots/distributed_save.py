"""`distributed_save`: a data service computes a pipeline once, and writes its elements into a
folder."""

from __future__ import annotations

import uuid
from math import inf
from typing import Any

from zmqdist.clock import seconds
from zmqdist.data import storage
from zmqdist.data.chunks import spec_to_json
from zmqdist.data.dataset import Dataset
from zmqdist.data.ops.snapshots import checked_compression
from zmqdist.data.service.client import REGISTER_S, ask_dispatcher, check_dataset
from zmqdist.data.service.service_address import Service, service_of
from zmqdist.errors import from_code
from zmqdist.field_types import checked


@checked
def distributed_save(
    dataset: Dataset, path: str, data_service_address: Any, compression: str | None = "AUTO"
) -> SnapshotHandle:
    """Have the workers of a data service write a dataset into a folder, for `Dataset.load`. Blocks
    until the dispatcher has begun the snapshot.

    >>> service, numbers = zd.data.service, Dataset.range(5)
    >>> config = service.DispatcherConfig(work_dir=f"{folder}/work", fault_tolerant_mode=True)
    >>> with service.DispatchServer(config) as dispatcher:
    ...     with service.WorkerServer(service.WorkerConfig(dispatcher.address)):
    ...         service.distributed_save(numbers, f"{folder}/five", dispatcher).wait(60)
    >>> print(*sorted(Dataset.load(f"{folder}/five")))
    0 1 2 3 4

    Use this for a pipeline that is expensive and read often. Each element is computed by one
    worker, and again only if that worker ends before it has committed the element. All workers and
    the dispatcher must reach the folder by the same path. The service continues to write after this
    program has ended, and after restarts of the dispatcher and of workers. This function does not
    wait until the elements are written. To wait, call `SnapshotHandle.wait`. If the spec of the
    dataset is unknown, this program computes the first element.

    Args:
      path: a folder that does not exist yet, on a shared file system or as a URL (which needs the
        package fsspec).
      data_service_address: the dispatcher, as "host:port" or in another form that `distribute`
        accepts.
      compression: "AUTO" (the same as "SNAPPY"), "GZIP", "SNAPPY" (quick), "ZLIB" (small) or None.

    Raises:
      ValueError: the address or the compression is invalid. InvalidArgumentError: the dataset is
        infinite, or the dispatcher has no journal.
      AlreadyExistsError: the path exists.
      FailedPreconditionError: the file system of the path has no atomic rename, the dataset cannot
        be serialized, or it is empty, so that its spec is unknown.
      UnimplementedError: a source of the dataset cannot be split, or its elements cannot be
        written.
      DeadlineExceededError: no dispatcher replied within an hour.
    """
    if not isinstance(getattr(data_service_address, "target", data_service_address), str):
        raise ValueError(
            f"`data_service_address` must be a string, but is a "
            f"{type(data_service_address).__name__}"
        )
    if not data_service_address:
        raise ValueError("`data_service_address` must not be empty")
    checked_compression(compression)
    check_dataset(dataset)
    path, service = storage.absolute(str(path)), service_of(data_service_address)
    description, spec = dataset.serialize(), spec_to_json(dataset.element_spec)
    _ask(path, service, "save", uuid.uuid4().hex, path, description, spec, compression)
    return SnapshotHandle(path, service)


class SnapshotHandle:
    """A snapshot that a data service writes. Dropping the handle does not stop the snapshot.

    Attributes:
      path: the folder of the snapshot.
    """

    def __init__(self, path: str, service: Service) -> None:
        self.path = path
        self._service = service

    def __repr__(self) -> str:
        return f"<snapshot {self.path} by {self._service.address}>"

    def wait(self, timeout: float | None = None) -> None:
        """Block until the snapshot is complete.

        Args:
          timeout: seconds; None means no limit. The wait continues across restarts of the
            dispatcher.

        Raises:
          DeadlineExceededError: the snapshot was not complete after `timeout`.
          CancelledError: a program has cancelled the snapshot.
          NotFoundError: the dispatcher does not know the snapshot, because it was restarted without
            its journal.
          OpError: the error of the pipeline on a worker, or of writing the folder.
        """
        code, message = _ask(
            self.path, self._service, "snapshot_wait", self.path, timeout_s=seconds(timeout)
        )
        if code:
            raise from_code(code, message)

    def progress(self) -> dict[str, Any]:
        """Return the progress of the snapshot. Blocks until the dispatcher has read the folder and
        replied.

        The keys are `state` ("active", "winding down", "done" or "error"), `error` (None, or a dict
        of `code` and `message`), `streams`, `streams_done`, the numbers of committed `chunks` and
        `elements`, the number of `positions` of all sources (-1 if they have no end), and how many
        of these are `handed_out`.
        """
        return dict(_ask(self.path, self._service, "snapshot_progress", self.path))

    def cancel(self) -> None:
        """Cancel the snapshot. Committed chunks stay in the folder, with a file ERROR that says
        that the snapshot was cancelled. Does nothing if the snapshot is already complete or has
        failed.
        """
        _ask(self.path, self._service, "snapshot_cancel", self.path)


def _ask(
    path: str, service: Service, method: str, *args: Any, timeout_s: float | None = REGISTER_S
) -> Any:
    """Call a method of the service's dispatcher, and repeat the call across restarts of the
    dispatcher. Raises DeadlineExceededError if no dispatcher replies in time.
    """
    phrase = f"{method} of {path} at {service.address}"
    return ask_dispatcher(
        service, method, *args, purpose=phrase, timeout_s=inf if timeout_s is None else timeout_s
    )
