"""Datasets whose elements are dealt to the replicas of a worker.

Rules
    They are made by a strategy and iterated on workers only: on the coordinator they are handed to `create_per_worker_dataset`.
    `experimental_distribute_dataset` cuts each batch into as many parts as there are replicas, as equal as possible. Of a dataset that a
    function made, each replica takes an element of its own. With one replica both give the dataset's own elements.
    Every worker has the whole dataset: `InputContext` says one pipeline, whatever the number of workers.

Not here: how a dataset gets to the workers (scheduling/coordinator/per_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zmqdist import nest, task_context
from zmqdist.training.per_replica import PerReplica


class InputContext:
    """What a dataset function may want to know.

    Attributes:
      num_input_pipelines: 1.
      input_pipeline_id: 0.
      num_replicas_in_sync: replicas of one worker.
    """

    def __init__(self, num_input_pipelines: int = 1, input_pipeline_id: int = 0, num_replicas_in_sync: int = 1) -> None:
        self.num_input_pipelines = num_input_pipelines
        self.input_pipeline_id = input_pipeline_id
        self.num_replicas_in_sync = num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Raises ValueError where it cannot be divided."""
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"the global batch size {global_batch_size} cannot be divided by {self.num_replicas_in_sync} replicas"
            )
        return size

    def __repr__(self) -> str:
        return f"<InputContext for {self.num_replicas_in_sync} replicas>"


class _Distributed:
    """What both kinds share. Pickles as what it was made of, so that a worker makes its own."""

    _method = ""

    def __init__(self, source: Any, replicas: int) -> None:
        self._source = source
        self._replicas = replicas
        self._on_worker = task_context.scheduled()

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self._source, self._replicas)

    def _dataset(self) -> Any:
        raise NotImplementedError

    def _elements(self, dataset: Any) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Its elements, for the replicas of this worker. Raises ValueError on the coordinator."""
        if not self._on_worker:
            raise ValueError(
                f"what {self._method} gives cannot be iterated here: pass it to ClusterCoordinator.create_per_worker_dataset, or make it "
                "in the function that you pass there"
            )
        dataset = self._dataset()
        return iter(dataset) if self._replicas == 1 else self._elements(iter(dataset))

    @property
    def element_spec(self) -> Any:
        """That of the dataset's own elements. Raises NotImplementedError where only the worker knows it."""
        raise NotImplementedError


class DistributedDataset(_Distributed):
    """What `experimental_distribute_dataset` gives."""

    _method = "experimental_distribute_dataset"

    def _dataset(self) -> Any:
        return self._source

    def _elements(self, dataset: Iterator[Any]) -> Iterator[Any]:
        for element in dataset:
            yield nest.map_structure(self._split, element)

    def _split(self, leaf: Any) -> PerReplica:
        array = np.asarray(leaf)
        if array.ndim == 0:
            raise ValueError("a scalar cannot be split between replicas: batch the dataset")
        return PerReplica(np.array_split(array, self._replicas))

    @property
    def element_spec(self) -> Any:
        return self._source.element_spec


class DistributedDatasetsFromFunction(_Distributed):
    """What `distribute_datasets_from_function` gives."""

    _method = "distribute_datasets_from_function"

    def _dataset(self) -> Any:
        return self._source(InputContext(num_replicas_in_sync=self._replicas))

    def _elements(self, dataset: Iterator[Any]) -> Iterator[Any]:
        while elements := [element for _, element in zip(range(self._replicas), dataset, strict=False)]:
            missing = self._replicas - len(elements)  # in the last round
            if missing:
                elements += [nest.map_structure(_no_rows, elements[-1])] * missing
            yield nest.map_structure(lambda *leaves: PerReplica(leaves), *elements)

    @property
    def element_spec(self) -> Any:
        return self._dataset().element_spec


def _no_rows(leaf: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(leaf)
    return array[:0] if array.ndim else np.zeros_like(array)


def _rebuilt(cls: type[_Distributed], source: Any, replicas: int) -> _Distributed:
    rebuilt = cls(source, replicas)
    rebuilt._on_worker = True
    return rebuilt


def per_replica(fn: Callable[[Any], Any], replicas: int) -> Any:
    """`fn(ValueContext)` for each replica."""
    from zmqdist.training.per_replica import regroup

    values = [fn(ValueContext(replica, replicas)) for replica in range(replicas)]
    return values[0] if replicas == 1 else regroup(values)


class ValueContext:
    """For which replica `experimental_distribute_values_from_function` wants a value.

    Attributes:
      replica_id_in_sync_group: 0, 1, ...
      num_replicas_in_sync: how many there are.
    """

    def __init__(self, replica: int, replicas: int) -> None:
        self.replica_id_in_sync_group = replica
        self.num_replicas_in_sync = replicas
