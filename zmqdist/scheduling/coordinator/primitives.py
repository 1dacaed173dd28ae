"""`Lock`, `Semaphore`, `Queue` and `Event`, which the processes of a cluster share by name.

The dispatcher keeps their states (coordination/primitives_machine.py), and no process is started for
them. Objects of the same class, name and cluster stand for the same thing in all processes.

Not here: leases, and what happens when a connection ends (coordination/primitives_client_machine.py).
"""

from __future__ import annotations

import queue
from contextlib import ExitStack, suppress
from math import inf
from typing import Any, ClassVar

import msgspec

from zmqdist.clock import monotonic, seconds
from zmqdist.coordination.primitives_client import PrimitivesLink, link_to
from zmqdist.coordination.primitives_machine import EVENT, LOCK, QUEUE, SEMAPHORE
from zmqdist.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError
from zmqdist.field_types import checked, safe_repr
from zmqdist.limits import KEY_CHARS_MAX, QUEUE_ITEM_BYTES_MAX
from zmqdist.scheduling.coordinator.dispatcher_target import resolve
from zmqdist.scheduling.shared import own_cluster
from zmqdist.task_context import settle_update
from zmqdist.wire import results as result_forms
from zmqdist.wire import trusted

_FOR_WORK = ("get", "put", "wait")
"""The requests that may wait for functions which have not begun. A holder of a lock has begun, so a
function that waits for the lock keeps its place."""

_ITEM = msgspec.msgpack.Decoder(list[bytearray])


class _Primitive:
    """A name, a size and a cluster. `_keeper` is the incarnation of the dispatcher that has the
    state."""

    _kind: ClassVar[str]
    _link: PrimitivesLink | None = None
    _keeper = 0

    def __init__(self, name: str, size: int | None, cluster: Any, form: str | None = None) -> None:
        if not 0 < len(name) <= KEY_CHARS_MAX:
            text = f"the name of a {self._kind} has 1 to {KEY_CHARS_MAX} characters"
            raise InvalidArgumentError(f"{text}, not {len(name)}")
        self.name = name
        self._size = size
        self._is_default = cluster is None
        self._target = resolve(cluster, form)

    def _connected(self) -> PrimitivesLink:
        # the objects of a process share a link, which lives as long as one of them
        self._link = link_to(self._target.address, self._target.credentials)
        return self._link

    def _request(self, verb: str, timeout: Any = None, item: bytes = b"") -> Any:
        """Return the outcome of a request; None after `timeout` seconds."""
        timeout_s = seconds(timeout)
        due = inf if timeout_s is None else monotonic() + timeout_s
        if timeout_s == 0 or verb not in _FOR_WORK or own_cluster.present() is None:
            return self._outcome(verb, due, item)
        outcome = self._outcome(verb, monotonic(), item)
        if outcome is not None:
            return outcome
        with ExitStack() as stack:
            # without room for other work the function keeps its place while it waits
            with suppress(ResourceExhaustedError):
                stack.enter_context(own_cluster.waiting())
            return self._outcome(verb, due, item)

    def _outcome(self, verb: str, due: float, item: bytes) -> Any:
        settle_update()
        link = self._connected()
        key = self._kind, self.name
        request = link.machine.request(verb, key, self._size, item, due, self._keeper)
        try:
            outcome, self._keeper = link.run(request)
        except AbortedError:
            self._keeper = 0  # the next call begins with a new state
            raise
        return outcome

    def __reduce__(self) -> Any:
        target = self._target.address, self._is_default, self._target.form.safe_only
        return _restored, (type(self), self.name, self._size, *target)

    @safe_repr
    def __repr__(self) -> str:
        return f"{self.name!r} at {self._target.address}"


class _Places(_Primitive):
    """What locks and semaphores have in common."""

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Take a place, and wait for it if there is none. Return False after `timeout` seconds, or
        at once if `blocking` is False and there is no place.

        >>> lock = zd.Lock("model", cluster=cluster)
        >>> lock.acquire(), lock.acquire(timeout=0.1)
        (True, False)
        >>> lock.release()

        Processes get places in the order in which they asked. A `timeout` of None or -1 waits
        without a limit.

        Raises:
          ValueError: `timeout` is negative, or is given although `blocking` is False.
          UnavailableError: no dispatcher has answered for `timeout` seconds, at least CONNECT_S and
            at most CLUSTER_LOST_LIMIT_S.
          ResourceExhaustedError: too many names are in use.
          InvalidArgumentError: the semaphore is in use with another value.
        """
        limit_s = None if timeout == -1 else seconds(timeout)
        if limit_s is not None and (timeout < 0 or not blocking):  # type: ignore[operator]
            raise ValueError("timeout wants 0 s or more, and none if blocking is False")
        return self._request("acquire", limit_s if blocking else 0) is not None

    def release(self) -> None:
        """Give the place back that this process took last. Any thread may do so.

        >>> lock = zd.Lock("model", cluster=cluster)
        >>> lock.acquire()
        True
        >>> lock.release()

        Raises:
          RuntimeError: this process holds no place.
          AbortedError: the place was lost before, because the process had no contact with the
            dispatcher for a lease. Another process may have it.
        """
        link = self._connected()
        if not link.run(link.machine.release((self._kind, self.name))):
            raise RuntimeError(f"this process does not hold {self._kind} {self.name!r}")

    @property
    def fence(self) -> int:
        """The number of the place that this process took last; 0 if it holds none. Each later
        holder gets a larger number, so that a store can refuse the writes of an earlier one.

        >>> with zd.Lock("model", cluster=cluster) as lock:
        ...     lock.fence > 0
        True
        """
        hold = self._connected().machine.hold((self._kind, self.name), monotonic())
        return 0 if hold is None else hold.fence

    def locked(self) -> bool:
        """Return whether all places are taken, by any processes.

        >>> zd.Lock("model", cluster=cluster).locked()
        False
        """
        taken, _, _, _ = self._request("look")
        return bool(taken >= (self._size or 1))

    def __enter__(self) -> Any:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@checked
class Lock(_Places):
    """A lock that one process of the cluster holds at a time.

    >>> with zd.Lock("model", cluster=cluster) as lock:
    ...     print(lock.locked())
    True

    It is used like `threading.Lock`; like that one it is not re-entrant. A process that ends, or has
    no contact with the dispatcher for a lease (10 s), loses the lock to the next process, and its
    `release` raises AbortedError.

    Args:
      name: locks of equal names are one lock. At most KEY_CHARS_MAX characters.
      cluster: a `local_cluster`, a DispatchServer, what `connect` returned, or "host:port". None
        means the cluster that `ClusterCoordinator()` finds.

    Raises (from the constructor): the errors of ClusterCoordinator.
    """

    _kind = LOCK

    def __init__(self, name: str, *, cluster: Any = None) -> None:
        super().__init__(name, 1, cluster)


@checked
class Semaphore(_Places):
    """A semaphore with places for `value` holders in the cluster.

    >>> with zd.Semaphore("licences", 2, cluster=cluster) as semaphore:
    ...     print(semaphore.locked())
    False

    A process may hold several places, and gives back only places that it holds. Places of lost
    processes are free again, as with Lock.

    Args:
      name, cluster: as for Lock.
      value: the number of places, 1 or more; the same in all processes.

    Raises (from the constructor):
      ValueError: `value` is below 1.
    """

    _kind = SEMAPHORE

    def __init__(self, name: str, value: int = 1, *, cluster: Any = None) -> None:
        if value < 1:
            raise ValueError(f"value is {value}, wants 1 or more")
        super().__init__(name, value, cluster)


@checked
class Queue(_Primitive):
    """A first-in, first-out queue, into which any process of the cluster puts what any other one
    gets.

    >>> queue = zd.Queue("jobs", cluster=cluster)
    >>> queue.put({"step": 3})
    >>> queue.get()
    {'step': 3}

    It is used like `queue.Queue`. Items are pickled, at most QUEUE_ITEM_BYTES_MAX (1 MiB) each, and
    wait in the memory of the dispatcher. No item is given to two processes. An item whose getter
    dies before it has received the item returns to the queue.

    Args:
      name, cluster: as for Lock.
      maxsize: how many items the queue holds before `put` waits; 0 means no bound. None leaves that
        to other processes.
      results: with "safe", `get` unpickles nothing, and `put` accepts only values of types that RPC
        accepts.
    """

    _kind = QUEUE

    def __init__(
        self,
        name: str,
        maxsize: int | None = None,
        *,
        cluster: Any = None,
        results: str | None = None,
    ) -> None:
        super().__init__(name, None if maxsize is None else max(0, maxsize), cluster, results)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item at the end. Wait while the queue is full.

        >>> queue = zd.Queue("few", 1, cluster=cluster)
        >>> queue.put(1)
        >>> queue.put(2, timeout=0.1)
        Traceback (most recent call last):
            ...
        queue.Full
        >>> queue.get()
        1

        Raises:
          queue.Full: the queue was full for `timeout` seconds, or `block` is False and it is full.
          InvalidArgumentError: the item cannot be pickled, or is too large; or the queue is in use
            with another maxsize.
          ResourceExhaustedError: the items of all queues take QUEUED_BYTES_MAX, or too many names
            are in use.
          AbortedError: the connection ended meanwhile, and the item may be in the queue, or not; or
            the dispatcher was restarted, and items that were in the queue are lost.
          UnavailableError: as for Lock.acquire.
        """
        is_safe = self._target.form.safe_only
        packed = result_forms.pack(item) if is_safe else trusted.pack(item)
        parts = packed if isinstance(packed, list) else [packed]
        nbytes = sum(memoryview(part).nbytes for part in parts)
        blob = b"" if nbytes > QUEUE_ITEM_BYTES_MAX else msgspec.msgpack.encode(parts)
        if not 0 < len(blob) <= QUEUE_ITEM_BYTES_MAX:
            raise InvalidArgumentError(
                f"an item of {nbytes} bytes does not fit into queue {self.name!r}, which takes at "
                f"most {QUEUE_ITEM_BYTES_MAX} bytes an item: put the name of a file, or pass large "
                f"data as arguments and results of functions"
            )
        if self._request("put", timeout if block else 0, blob) is None:
            raise queue.Full

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first item. Wait while the queue is empty.

        >>> queue = zd.Queue("jobs", cluster=cluster)
        >>> queue.get(timeout=0.1)
        Traceback (most recent call last):
            ...
        _queue.Empty

        Raises:
          queue.Empty: there was no item for `timeout` seconds, or `block` is False and there is
            none.
          AbortedError: the connection ended for longer than a lease, and an item may be lost; or the
            dispatcher was restarted, and items that were in the queue are lost.
          FailedPreconditionError: with `results="safe"`, the item is a pickle.
          Exception: any exception that a class in the item raises while an object is rebuilt. The
            item is gone after these two errors.
          UnavailableError: as for Lock.acquire.
        """
        blob = self._request("get", timeout if block else 0)
        if blob is None:
            raise queue.Empty
        parts = _ITEM.decode(blob)
        packed = parts if len(parts) > 1 else parts[0]
        return result_forms.unpack(packed, safe_only=self._target.form.safe_only)

    def put_nowait(self, item: Any) -> None:
        """Put an item, or raise queue.Full if the queue is full now. As `put(item, block=False)`.

        >>> queue = zd.Queue("jobs", cluster=cluster)
        >>> queue.put_nowait("a")
        >>> queue.get_nowait()
        'a'
        """
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        """Take the first item, or raise queue.Empty if there is none now. As `get(block=False)`.

        >>> zd.Queue("jobs", cluster=cluster).get_nowait()
        Traceback (most recent call last):
            ...
        _queue.Empty
        """
        return self.get(block=False)

    def qsize(self) -> int:
        """Return the number of items now.

        >>> zd.Queue("jobs", cluster=cluster).qsize()
        0
        """
        return int(self._request("look")[1])

    def empty(self) -> bool:
        """Return whether the queue has no item now.

        >>> zd.Queue("jobs", cluster=cluster).empty()
        True
        """
        return self.qsize() == 0

    def full(self) -> bool:
        """Return whether the queue has `maxsize` items now.

        >>> zd.Queue("jobs", 10, cluster=cluster).full()
        False
        """
        _, count, _, size = self._request("look")
        return bool(0 < size <= count)


@checked
class Event(_Primitive):
    """A flag that processes of the cluster set, clear and wait for.

    >>> event = zd.Event("stop", cluster=cluster)
    >>> event.set()
    >>> event.wait(timeout=1), event.is_set()
    (True, True)
    >>> event.clear()

    It is used like `threading.Event`. It stays set when the process that has set it ends.

    Args:
      name, cluster: as for Lock.
    """

    _kind = EVENT

    def __init__(self, name: str, *, cluster: Any = None) -> None:
        super().__init__(name, None, cluster)

    def set(self) -> None:
        """Set the flag, which ends all waits.

        >>> event = zd.Event("stop", cluster=cluster)
        >>> event.set()
        >>> event.clear()

        Raises AbortedError and UnavailableError as `Queue.put` does.
        """
        self._request("set")

    def clear(self) -> None:
        """Clear the flag, so that later waits wait again.

        >>> zd.Event("stop", cluster=cluster).clear()

        Raises AbortedError and UnavailableError as `Queue.put` does.
        """
        self._request("clear")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set. Return False after `timeout` seconds.

        >>> zd.Event("stop", cluster=cluster).wait(timeout=0.1)
        False

        Raises AbortedError and UnavailableError as `Queue.put` does.
        """
        return self._request("wait", timeout) is not None

    def is_set(self) -> bool:
        """Return whether the flag is set now.

        >>> zd.Event("stop", cluster=cluster).is_set()
        False
        """
        return bool(self._request("look")[2])


def _restored(
    cls: type[_Primitive],
    name: str,
    size: int | None,
    address: str,
    is_default: bool,
    safe_only: bool,
) -> _Primitive:
    """Return the object that was pickled. Work of the same cluster reaches it as it reaches its own
    cluster. Pickles call this function by name."""
    own = own_cluster.present()
    same = own is not None and _numeric(own.dispatcher) == _numeric(address)
    restored = object.__new__(cls)
    cluster = None if own is not None and (same or is_default) else address
    _Primitive.__init__(restored, name, size, cluster, "safe" if safe_only else None)
    return restored


def _numeric(address: str) -> str:
    return address.replace("localhost:", "127.0.0.1:")
