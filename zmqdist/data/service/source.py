"""The operator `distribute`: a source whose elements come from a data service."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.ops.base import Op
from zmqdist.data.service.dispatcher.machine.records import Terms
from zmqdist.data.service.reader.runtime import ReadRequest, SavedReader, ServiceReader
from zmqdist.data.service.service_address import Service
from zmqdist.errors import FailedPreconditionError, UnimplementedError
from zmqdist.transport.credentials import Credentials


class _ReadingNode(OperatorNode):
    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self._reader = ServiceReader(
            _next_request(dataset, context),
            self.op.credentials,
            context.interrupts,
            dataset.memory,
        )
        self._batch: Iterator[Any] = iter(())
        context.interrupts.close_blocks = True

    def run(self) -> Iterator[Any]:
        yield from self._batch
        for batch in self._reader.batches():
            self._batch = iter(batch)
            yield from self._batch

    def state(self) -> dict[str, Any]:
        raise UnimplementedError(
            'an iterator over distribute() has a state only with delivery="exactly_once": '
            "otherwise no worker sends an element again",
        )

    def abandon(self) -> None:
        self._reader.interrupt()

    def close(self) -> None:
        super().close()
        self._reader.close()


class _PortionsNode(OperatorNode):
    """Reads a distributed dataset in portions. The node opens its reader at the first element, so
    that a state can be loaded first."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self._request = _next_request(dataset, context)
        dataset.memory.values.setdefault("reader", secrets.randbits(62))
        self._reader: ServiceReader | None = None
        self._saved: dict[str, Any] = {}
        self._elements: Iterator[Any] = iter(())
        context.interrupts.close_blocks = True

    def run(self) -> Iterator[Any]:
        if self._reader is None:
            saved = SavedReader.of(self._saved) if self._saved else None
            values = self.dataset.memory.values
            request = msgspec.structs.replace(
                self._request,
                saved=saved,
                reader=values["reader"],
                again=values.get("resumed", False),
            )
            self._reader = ServiceReader(
                request, self.op.credentials, self.context.interrupts, self.dataset.memory
            )
        yield from self._elements
        for elements in self._reader.pieces():
            self._elements = elements
            yield from elements

    def state(self) -> dict[str, Any]:
        reader = self._saved if self._reader is None else self._reader.state()
        return {"repetition": self._request.repetition, "reader": reader}

    def load(self, state: dict[str, Any]) -> None:
        if state["reader"]:
            SavedReader.of(state["reader"])
        self.close()
        self._reader, self._elements, self._saved = None, iter(()), state["reader"]
        self._request = msgspec.structs.replace(self._request, repetition=state["repetition"])
        self.dataset.memory.begin_pass(state["repetition"])

    def abandon(self) -> None:
        if self._reader is not None:
            self._reader.interrupt()

    def close(self) -> None:
        super().close()
        if self._reader is not None:
            self._reader.close()


def _next_request(dataset: DatasetLike, context: Context) -> ReadRequest:
    op: Any = dataset.op
    if op.job_name is not None:
        # Each pass of a job can be read once. A state has the passes of the datasets of its
        # pipeline, but knows no datasets that functions will return.
        context.refuse_state_in_functions(
            f"no state tells which passes of the job {op.job_name!r} an iterator has read "
            f"whose"
            " function (of flat_map, interleave, ...) returns a dataset that is distributed with "
            "this"
            " job_name: leave out job_name, or use the dataset outside of functions, such as by "
            "repeat()"
        )
    return ReadRequest(op, context.begin_pass(dataset.memory, shared=True)[1])


@operator("distribute", _ReadingNode)
class Distributed(Op):
    """Yields the elements of a registered dataset, which the workers of a data service compute.
    Most fields come from the arguments of `distribute`. `dataset` is the id of the registered
    dataset, and `count` the number of elements that a reader gets.
    """

    spec_field = "spec"

    service: str
    dataset: str
    mode: int
    job_name: str | None
    consumer_index: int
    num_consumers: int
    max_outstanding: int
    protocol: str
    trainer: str
    target_workers: str
    delivery: str
    ordered: bool
    spec: Any
    compression: str | None
    count: int
    refresh_ms: int = 0
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    @property
    def credentials(self) -> Credentials:
        """The Credentials for connections to the dispatcher and the workers."""
        return Service(self.service, self.token_file, self.keys_dir, self.insecure).credentials

    @property
    def terms(self) -> Terms:
        """The terms on which the dataset is read."""
        return Terms(
            self.dataset,
            self.mode,
            self.num_consumers,
            self.target_workers,
            bool(self.trainer),
            self.delivery,
            self.ordered,
        )

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        return (_PortionsNode if self.terms.portioned else _ReadingNode)(dataset, context)

    @property
    def is_shared(self) -> bool:
        return self.job_name is not None

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count

    def infer(self, dataset: DatasetLike) -> Any:
        """Return the spec of the pipeline to which this process has applied `distribute`. The spec
        is not inferred from an element of the service, because that would begin an iteration there.
        """
        upstream = self.__dict__.get("upstream")
        if upstream is None:
            text = (
                f"the element_spec of dataset {self.dataset} is not known to the service: give it "
                f"to `from_dataset_id`,"
                " or `output_signature` to the function that makes the elements"
            )
            raise FailedPreconditionError(text)
        return upstream.element_spec

    def split_count(self) -> int:
        raise UnimplementedError(
            "Cannot create split providers for dataset of type DataServiceDataset"
        )
