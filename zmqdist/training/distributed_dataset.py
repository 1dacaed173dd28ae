"""Datasets whose elements are distributed to the replicas of a worker.

Rules
    A strategy makes these datasets. The program passes them to `create_per_worker_dataset`, and
    only workers iterate over them. `experimental_distribute_dataset` splits each batch into one
    part for each replica. The parts are as equal as possible. A scalar cannot be split, and raises
    ValueError.
    `distribute_datasets_from_function` gives each replica an element of its own. If fewer elements
    than replicas are left at the end, the other replicas get arrays without rows, and 0 in place of
    a scalar. With one replica, the datasets of both methods yield the elements of the source
    itself.
    Every worker iterates over the whole dataset, so `InputContext` reports one pipeline, whatever
    the number of workers.

Not here: how a dataset is sent to the workers (scheduling/coordinator/per_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zmqdist import nest, task_context
from zmqdist.field_types import checked
from zmqdist.training.per_replica import PerReplica, regroup


@checked
class InputContext:
    """The argument of a dataset function. It describes the replicas for which the function makes a
    dataset.

    >>> zd.tf.InputContext(2, 0, 2).get_per_replica_batch_size(64)
    32

    Attributes:
      num_input_pipelines: always 1.
      input_pipeline_id: always 0.
      num_replicas_in_sync: number of replicas of one worker.
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        self.num_input_pipelines = num_input_pipelines
        self.input_pipeline_id = input_pipeline_id
        self.num_replicas_in_sync = num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica. Raises ValueError if `global_batch_size` is not
        divisible by the number of replicas.

        >>> zd.tf.InputContext(2, 0, 4).get_per_replica_batch_size(64)
        16
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"the global batch size {global_batch_size} cannot be divided by "
                f"{self.num_replicas_in_sync} replicas"
            )
        return size

    def __repr__(self) -> str:
        return f"<InputContext for {self.num_replicas_in_sync} replicas>"


class _Distributed:
    """Base of DistributedDataset and DistributedDatasetsFromFunction. An instance pickles as its
    source, which is a dataset or a function, so that each worker makes a dataset of its own.
    """

    _method = ""

    def __init__(self, source: Any, replicas: int) -> None:
        self._source = source
        self._replicas = replicas
        self._on_worker = task_context.scheduled()

    def __getstate__(self) -> dict[str, Any]:
        # pickling takes the object to a worker
        return {**vars(self), "_on_worker": True}

    def _dataset(self) -> Any:
        raise NotImplementedError

    def _elements(self, dataset: Any) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the elements for the replicas of this worker. Raises ValueError
        in the program."""
        if not self._on_worker:
            raise ValueError(
                f"the result of {self._method} cannot be iterated here: pass it to "
                f"ClusterCoordinator.create_per_worker_dataset, or make "
                "it in the function that you pass there"
            )
        dataset = self._dataset()
        return iter(dataset) if self._replicas == 1 else self._elements(iter(dataset))

    @property
    def element_spec(self) -> Any:
        """Spec of the source's own elements, before they are split. If the source is a function,
        this calls it in this process."""
        return self._dataset().element_spec


class DistributedDataset(_Distributed):
    """The result of `experimental_distribute_dataset`."""

    _method = "experimental_distribute_dataset"

    def _dataset(self) -> Any:
        return self._source

    def _elements(self, dataset: Iterator[Any]) -> Iterator[Any]:
        for element in dataset:
            yield nest.map_structure(self._split, element)

    def _split(self, leaf: Any) -> PerReplica | None:
        if leaf is None:
            return None
        array = np.asarray(leaf)
        if array.ndim == 0:
            raise ValueError("a scalar cannot be split between replicas: batch the dataset")
        return PerReplica(np.array_split(array, self._replicas))


class DistributedDatasetsFromFunction(_Distributed):
    """The result of `distribute_datasets_from_function`."""

    _method = "distribute_datasets_from_function"

    def _dataset(self) -> Any:
        return self._source(InputContext(num_replicas_in_sync=self._replicas))

    def _elements(self, dataset: Iterator[Any]) -> Iterator[Any]:
        while elements := [
            element for _, element in zip(range(self._replicas), dataset, strict=False)
        ]:
            # At the end of the dataset there may be fewer elements than replicas. The replicas
            # without an element get batches without rows.
            missing = self._replicas - len(elements)
            if missing:
                elements += [nest.map_structure(_no_rows, elements[-1])] * missing
            yield nest.map_structure(lambda *leaves: PerReplica(leaves), *elements)


def _no_rows(leaf: Any) -> np.ndarray[Any, Any] | None:
    if leaf is None:
        return None
    array = np.asarray(leaf)
    return array[:0] if array.ndim else np.zeros_like(array)


def per_replica(fn: Callable[[Any], Any], replicas: int) -> Any:
    """Call `fn(ValueContext)` once for each replica. Return the results in the form that `run`
    accepts as an argument."""
    values = [fn(ValueContext(replica, replicas)) for replica in range(replicas)]
    return values[0] if replicas == 1 else regroup(values)


@checked
class ValueContext:
    """The argument of a function that `experimental_distribute_values_from_function` calls. It
    describes the replica for which the function makes a value.

    >>> values = strategy.experimental_distribute_values_from_function(
    ...     lambda context: context.replica_id_in_sync_group
    ... )
    >>> strategy.run(lambda x: x, args=(values,))
    0

    Attributes:
      replica_id_in_sync_group: index of the replica, from 0.
      num_replicas_in_sync: number of replicas.
    """

    def __init__(self, replica: int, replicas: int) -> None:
        self.replica_id_in_sync_group = replica
        self.num_replicas_in_sync = replicas
