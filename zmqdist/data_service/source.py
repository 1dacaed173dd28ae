"""The operator whose elements come from a data service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zmqdist.core.splits.records import Terms
from zmqdist.data.iterators import Context, Node
from zmqdist.data.ops.base import Op, operator
from zmqdist.data.structure import UNKNOWN_SPEC
from zmqdist.data_service.reading import Reader, Wish
from zmqdist.data_service.rounds_reading import RoundsReader
from zmqdist.errors import FailedPreconditionError, UnimplementedError
from zmqdist.net.credentials import Credentials

if TYPE_CHECKING:
    from zmqdist.data.tree import Tree


class _ReadingNode(Node):
    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        op: Distributed = self.op
        terms = Terms(
            op.dataset,
            op.mode,
            op.num_consumers,
            op.target_workers,
            bool(op.trainer),
            op.delivery,
            op.ordered,
        )
        kind = RoundsReader if op.num_consumers else Reader
        self._reader = kind(
            Wish(
                op.service,
                terms,
                op.job_name,
                dataset.memory.number(),
                op.max_outstanding,
                op.consumer_index,
                op.trainer,
                op.protocol,
                op.compression,
                UNKNOWN_SPEC if op.spec is None else op.spec,
                op.refresh_ms / 1000,
            ),
            Credentials(None, None, False),
        )
        self._batch: Iterator[Any] = iter(())

    def run(self) -> Iterator[Any]:
        yield from self._batch
        for batch in self._reader.batches():
            self._batch = iter(batch)
            yield from self._batch

    def abandon(self) -> None:
        self._reader.interrupt()

    def close(self) -> None:
        super().close()
        self._reader.close()


@operator("distribute", _ReadingNode)
@dataclass(frozen=True)
class Distributed(Op):
    """A registered dataset as the workers of a service compute it. Fields as the arguments of `distribute`."""

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

    @property
    def is_shared(self) -> bool:
        return self.job_name is not None

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return UNKNOWN_SPEC if self.spec is None else self.spec

    def infer(self, dataset: Tree) -> Any:
        """Where it was made from a pipeline here, that one's: reading would begin an iteration."""
        upstream = self.__dict__.get("upstream")
        if upstream is None:
            text = (
                f"the element_spec of dataset {self.dataset} is not known to the service: give it to `from_dataset_id`,"
                " or `output_signature` to the function that makes the elements"
            )
            raise FailedPreconditionError(None, None, text)
        return upstream.element_spec

    def split_count(self) -> int:
        raise UnimplementedError(None, None, "Cannot create split providers for dataset of type DataServiceDataset")
