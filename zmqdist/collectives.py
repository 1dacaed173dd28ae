"""Names and options of collectives, and the operations of TensorFlow's CrossDeviceOps on them.

In TensorFlow a replica may have several devices, and a value is "per replica": here each task is one replica and has one value. So
`destinations`, where results are to be, says nothing: they are at every member, in memory. Where TensorFlow takes a list with one value for
each local device, these functions take that list too; it has one item.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger("zmqdist.collectives")


class ReduceOp(enum.Enum):
    """How values are put together. MEAN is the sum divided by the size of the group, of whole numbers as float64."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"

    @staticmethod
    def of(op: Any) -> ReduceOp:
        """An op, or its name in any case; "prod" is "product". Raises ValueError: neither."""
        if isinstance(op, ReduceOp):
            return op
        name = op.upper() if isinstance(op, str) else op
        for known in ReduceOp:
            if name in (known.name, known.value.upper()):
                return known
        raise ValueError(f"{op!r} is no ReduceOp: there are {', '.join(known.name for known in ReduceOp)}")


class CommunicationImplementation(enum.Enum):
    """What TensorFlow lets choose from. All of them mean the one way that there is here."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


@dataclass(frozen=True, init=False)
class CommunicationOptions:
    """How collectives are done.

    Attributes:
      bytes_per_pack: neighbouring arrays of a structure are reduced together until they have so many bytes; 0 for the default. Results do
        not depend on it.
      timeout_seconds: of each collective; None for the default (limits.COLLECTIVE_TIMEOUT_S).
      implementation: of no effect.
    """

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        """Raises ValueError: a negative size, or no such implementation."""
        if bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must not be negative, given {bytes_per_pack}")
        if isinstance(implementation, str):
            known = CommunicationImplementation.__members__
            if implementation.upper() not in known:
                raise ValueError(f"implementation {implementation!r}: there are {', '.join(known)}")
            implementation = known[implementation.upper()]
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(f"implementation {implementation!r} is no CommunicationImplementation")
        object.__setattr__(self, "bytes_per_pack", bytes_per_pack)
        object.__setattr__(self, "timeout_seconds", timeout_seconds)
        object.__setattr__(self, "implementation", implementation)

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """These, but what differs from the defaults in `other` as it is there."""
        if other is None:
            return self
        default = CommunicationImplementation.AUTO
        return CommunicationOptions(
            other.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if other.timeout_seconds is None else other.timeout_seconds,
            self.implementation if other.implementation is default else other.implementation,
        )


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:
    """The former name of CommunicationOptions; logs a warning."""
    log.warning("CollectiveHints is deprecated: use CommunicationOptions")
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


class CollectiveMember(Protocol):
    """What these functions need of a zmqdist.Server."""

    def all_reduce(
        self, x: Any, op: Any = "sum", group: Any = None, timeout: float | None = None, *, options: Any = None
    ) -> Any:
        """See Server.all_reduce."""

    def all_gather(self, x: Any, axis: int = 0, group: Any = None, timeout: float | None = None) -> Any:
        """See Server.all_gather."""

    def broadcast(self, x: Any, root: int = 0, group: Any = None, timeout: float | None = None) -> Any:
        """See Server.broadcast."""


class CrossDeviceOps:
    """TensorFlow's operations on one value for each replica, over the tasks of a group.

    All methods are collectives: every member of the group calls them, in the same order.
    """

    def __init__(
        self, server: CollectiveMember, group: Any = None, options: CommunicationOptions | None = None
    ) -> None:
        """Args:
        server: the own task.
        group: as in Server.all_reduce.
        options: what holds where a method is given none.
        """
        self._server = server
        self._group = group
        self._options = options or CommunicationOptions()

    def reduce(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """The values of all replicas reduced, at every member.

        Raises:
          ValueError: no value, no op, or no destinations.
        """
        if destinations is None or (isinstance(destinations, Sequence) and not destinations):
            raise ValueError("destinations is missing: every member gets the result, so anything will do")
        return self._reduced(reduce_op, _own(per_replica_value), options)

    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Any, options: CommunicationOptions | None = None
    ) -> list[Any]:
        """Several values at once, in their order. Raises ValueError: not a list of pairs (value, destinations)."""
        pairs = list(value_destination_pairs)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError("wanted a list of pairs (value, destinations)")
        values: list[Any] = self._reduced(reduce_op, [_own(value) for value, _ in pairs], options)
        return values

    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """The value of the group's first member, at every member."""
        return self._server.broadcast(tensor, 0, self._group, self._options.timeout_seconds)

    def gather(
        self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """The values of all replicas, one after the other on an axis, at every member.

        Raises:
          ValueError: a scalar, or no such axis.
          NotImplementedError: IndexedSlices.
        """
        merged = self._options.merge(options)
        return self._server.all_gather(_own(per_replica_value), axis, self._group, merged.timeout_seconds)

    def _reduced(self, reduce_op: Any, value: Any, options: CommunicationOptions | None) -> Any:
        op, merged = ReduceOp.of(reduce_op), self._options.merge(options)
        return self._server.all_reduce(value, op, self._group, merged.timeout_seconds, options=merged)


def _own(per_replica_value: Any) -> Any:
    if isinstance(per_replica_value, (list, tuple)):
        if len(per_replica_value) != 1:
            raise ValueError(f"a replica is one task and has one value, not {len(per_replica_value)}")
        return per_replica_value[0]
    return per_replica_value
