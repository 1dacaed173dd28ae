"""The operators, a module for each family; all of them are in `base.OPERATORS`."""

from zmqdist.data.ops import batching, combining, elementwise, filtering, shuffling, sources
from zmqdist.data.ops.base import OPERATORS

__all__ = ["OPERATORS", "batching", "combining", "elementwise", "filtering", "shuffling", "sources"]
