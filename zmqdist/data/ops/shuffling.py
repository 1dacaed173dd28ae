"""shuffle: elements in random order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from zmqdist.data.constants import UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import operator
from zmqdist.data.ops.base import Op
from zmqdist.data.seeds import RandomNode
from zmqdist.data.structure import checked_int, invalid


class _ShuffleNode(RandomNode):
    fresh_option = "reshuffle"
    element_fields = ("buffer",)
    buffer: list[Any]

    def run(self) -> Iterator[Any]:
        buffer, uniform = self.buffer, self.draws.uniform
        # `shuffle(UNKNOWN_CARDINALITY)` sets no bound, because the user wants the whole input in
        # the buffer, even if it fills the memory.
        size = sys.maxsize if self.op.size == UNKNOWN_CARDINALITY else self.op.size
        for x in self.source():
            buffer.append(x)
            if len(buffer) >= size:
                chosen = int(uniform() * size)
                x = buffer[chosen]
                buffer[chosen] = buffer[-1]
                buffer.pop()
                yield x
        while buffer:
            chosen = int(uniform() * len(buffer))
            x = buffer[chosen]
            buffer[chosen] = buffer[-1]
            buffer.pop()
            yield x


@operator("shuffle", _ShuffleNode)
@dataclass(frozen=True)
class Shuffle(Op):
    """Yields random elements of a buffer of `size` elements. The next input element replaces each
    yielded element. If `size` is -2, the buffer holds all input elements before the first is
    yielded.
    """

    size: int
    seed: tuple[int, int] | None
    reshuffle: bool = True
    instead: ClassVar[str] = (
        ", or shuffle the file names or indices beforehand, and give them to from_tensor_slices"
    )

    @classmethod
    def checked(cls, size: Any) -> int:
        """Return the buffer size as an int. Raises InvalidArgumentError if it is neither positive
        nor -2, and TypeError if it is not an integer.
        """
        count = checked_int(size, "buffer_size")
        if count < 1 and count != UNKNOWN_CARDINALITY:
            raise invalid(
                f"buffer_size must be greater than zero or UNKNOWN_CARDINALITY, not {size}"
            )
        return count
