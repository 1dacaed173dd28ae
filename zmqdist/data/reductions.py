"""Methods of `Dataset` that read all elements and return no dataset: `reduce`, `save`,
`get_single_element`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from zmqdist.data.operator_traceback import stopped_error
from zmqdist.data.ops import elementwise, readers, saving
from zmqdist.data.structure import element, invalid, spec_of
from zmqdist.data.tree import Tree
from zmqdist.field_types import checked, converted


@checked
class DatasetResults(Tree):
    """The part of `Dataset` with the methods that read all elements."""

    __slots__ = ()

    def reduce(
        self, initial_state: Any, reduce_func: Callable[..., Any], name: str | None = None
    ) -> Any:
        """Compute `state = reduce_func(state, element)` for each element, beginning with
        `initial_state`, and return the last state.

        >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
        10

        Raises:
          TypeError: the state changes its structure, dtype or shape.
        """
        state = converted("initial_state", element, initial_state)
        spec = spec_of(state)
        for x in self:
            try:
                state = element(reduce_func(state, x))
            except StopIteration as error:
                raise stopped_error("reduce") from error
            elementwise.check_state(state, spec, "reduce")
        return state

    def save(
        self,
        path: str,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Write all elements to the folder `path`. Saving again to the folder adds a newer copy,
        and `load` reads the newest copy.

        >>> Dataset.range(3).save(f"{folder}/saved")
        >>> print(*Dataset.load(f"{folder}/saved"))
        0 1 2

        Args:
          compression: None, "GZIP" or "ZLIB".
          shard_func: a function that returns, for an element, the number of the file into which the
            element is written.
          checkpoint_args: {"directory": folder, "checkpoint_interval": number of elements}. After
            every interval (1,000 elements by default), `save` writes a checkpoint to `directory`.
            If `save` is interrupted, a second call with the same arguments continues from the
            checkpoint. The keys "max_to_keep" and "step_counter" are accepted and ignored.

        Raises:
          InvalidArgumentError: the dataset is infinite.
          ValueError: `compression` or `checkpoint_args` is invalid, or `shard_func` does not return
            an integer.
          UnimplementedError: `checkpoint_args` were passed, and the pipeline has an operator
            without a state.
          FailedPreconditionError: the dataset is empty and its spec is unknown. With
            `checkpoint_args` also: the checkpoint in `directory` belongs to another dataset, path
            or compression, or the dataset cannot be serialized.
        """
        checkpoints = saving.Checkpoints.of(checkpoint_args)
        saving.save(
            self, os.fspath(path), readers.checked_compression(compression), shard_func, checkpoints
        )

    def get_single_element(self, name: str | None = None) -> Any:
        """Return the only element.

        >>> int(Dataset.range(5).batch(5).map(np.sum).get_single_element())
        10

        Raises:
          InvalidArgumentError: there is no element, or more than one.
        """
        with iter(self) as iterator:
            for x in iterator:
                for _ in iterator:
                    raise invalid("Dataset had more than one element.")
                return x
        raise invalid("Dataset was empty.")
