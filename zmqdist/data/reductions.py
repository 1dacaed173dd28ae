"""What ends a pipeline: methods that read a dataset and give something else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from zmqdist.data.ops import elementwise, readers, saving
from zmqdist.data.structure import element, invalid, spec_of
from zmqdist.data.tree import Tree


class DatasetResults(Tree):
    """The part of `Dataset` that reads."""

    __slots__ = ()

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any], name: str | None = None) -> Any:
        """`reduce_func(state, element)` over all elements; the last state.

        Raises:
          TypeError: the state changes its structure, dtype or shape.
        """
        state = element(initial_state)
        spec = spec_of(state)
        for x in self:
            state = element(reduce_func(state, x))
            elementwise.check_state(state, spec, "reduce")
        return state

    def save(
        self,
        path: str,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Write all elements into the folder `path`, for `load`. Saving again makes a newer run, which `load` prefers.

        Args:
          compression: None, "GZIP" or "ZLIB".
          shard_func: gives the number of the file for an element.
          checkpoint_args: {"directory": folder, "checkpoint_interval": elements}: the place is kept there every so many elements (1,000),
            and the same save, called again after it was interrupted, goes on from it. `max_to_keep` and `step_counter` are accepted.

        Raises:
          InvalidArgumentError: the dataset is infinite. UnimplementedError: it cannot tell its place, as `checkpoint_args` ask.
          FailedPreconditionError: the place in `directory` is that of another save.
        """
        checkpoints = saving.Checkpoints.of(checkpoint_args)
        saving.save(self, os.fspath(path), readers.checked_compression(compression), shard_func, checkpoints)

    def get_single_element(self, name: str | None = None) -> Any:
        """The only element.

        Raises:
          InvalidArgumentError: there is none, or more than one.
        """
        with iter(self) as iterator:
            for x in iterator:
                for _ in iterator:
                    raise invalid("Dataset had more than one element.")
                return x
        raise invalid("Dataset was empty.")
