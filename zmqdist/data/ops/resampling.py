"""rejection_resample: leave out elements, so that the classes occur in given proportions.

An element of class c is kept with a probability proportional to target[c] / initial[c]. All
elements of the class with the largest ratio are kept. Without an initial distribution, the counts
of the classes so far are used instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqdist.data.constants import UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context
from zmqdist.data.ops.base import Op, PickledFunction
from zmqdist.data.ops.windows import int_scalar
from zmqdist.data.seeds import RandomNode
from zmqdist.data.structure import invalid
from zmqdist.specs import TensorSpec


class _ResampleNode(RandomNode):
    """Runs `rejection_resample`. `seen` counts the elements of each class so far."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.seen = [0] * len(self.op.target)

    def run(self) -> Iterator[Any]:
        fn, uniform = self.op.function.value, self.draws.uniform
        for x in self.source():
            kind = int_scalar(fn(*x) if type(x) is tuple else fn(x), "class_func")
            if not 0 <= kind < len(self.seen):
                raise invalid(
                    f"class_func returned {kind}, but target_dist has the classes 0 to "
                    f"{len(self.seen) - 1}"
                )
            self.seen[kind] += 1
            if uniform() < self._chance(kind):
                yield np.int64(kind), x

    def _chance(self, kind: int) -> float:
        target, initial = self.op.target, self.op.initial or self.seen
        ratios = [want / have for want, have in zip(target, initial, strict=True) if have]
        most = max(ratios)
        return target[kind] / initial[kind] / most if most and initial[kind] else 0.0

    def state(self) -> dict[str, Any]:
        return super().state() | {"seen": list(self.seen)}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.seen = list(state["seen"])


@operator("rejection_resample", _ResampleNode)
@dataclass(frozen=True)
class RejectionResample(Op):
    """Yields (class, element) for some elements, and leaves out the other elements."""

    result_count = UNKNOWN_CARDINALITY

    function: PickledFunction
    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seed: tuple[int, int] | None

    def stateful(self) -> bool:
        return self.seed is None

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return TensorSpec((), np.int64), inputs[0]
