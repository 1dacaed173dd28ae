"""A process's connection to a dispatcher for locks, semaphores, queues and events: the runtime of
primitives_client_machine.py.

All objects of a process for one dispatcher share a PrimitivesLink. The thread of an operation makes
the operation's calls, one after the other. A thread of the link renews the lease. A link that the
program has dropped closes its connection.

Not here: the public classes (scheduling/coordinator/primitives.py).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from zmqdist import task_context
from zmqdist.clock import monotonic
from zmqdist.coordination.primitives_client_machine import (
    AGAIN_S,
    KeeperCall,
    Operation,
    PrimitivesClient,
)
from zmqdist.coordination.primitives_service import PREFIX
from zmqdist.errors import OpError
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient, new_incarnation
from zmqdist.transport.credentials import Credentials

T = TypeVar("T")


class PrimitivesLink:
    """The link of this process to one dispatcher; `link_to` returns it. Any thread may use it.

    Attributes:
      machine: the operations, for `run`.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Connect in the background. Does not block."""
        role = "worker" if task_context.scheduled() else "submit"
        self._rpc = ZmqClient(address, security=credentials.client(address, role))
        self.machine = PrimitivesClient(address, os.getpid(), new_incarnation())
        self._lock = threading.Lock()
        """Held while an operation decides, and never while it waits."""
        wake = threading.Event()
        weakref.finalize(self, wake.set).atexit = False
        threading.Thread(
            target=_renew,
            args=(weakref.ref(self), wake),
            name="zmqdist-primitives-lease",
            daemon=True,
        ).start()

    def run(self, operation: Operation[T]) -> T:
        """Run an operation of the machine to its end, and return its result."""
        resume: Callable[[], KeeperCall] = partial(operation.send, None)
        try:
            while True:
                with self._lock:
                    self.machine.now = monotonic()
                    step = resume()
                try:
                    resume = partial(operation.send, self._call(step))
                except OpError as error:
                    resume = partial(operation.throw, error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            del resume  # its error refers to this frame
            with self._lock:
                operation.close()
                if self.machine.is_needed:
                    _holding.add(self)
                else:
                    _holding.discard(self)

    def _call(self, step: KeeperCall) -> Any:
        call = internal_client.start(
            self._rpc,
            PREFIX + step.method,
            *step.args,
            due=step.due,
            waits_for_server=step.waits,
        )
        try:
            return call.get_value()
        except OpError:
            raise
        except BaseException:  # for example Ctrl-C: the dispatcher must not count this request
            call.cancel()
            raise


def _renew(weak_link: weakref.ref[PrimitivesLink], wake: threading.Event) -> None:
    """Renew the lease of a link until the link is gone."""
    pause_s = AGAIN_S
    while not wake.wait(pause_s) and (link := weak_link()) is not None:
        pause_s = link.run(link.machine.renew())
        del link


_links: weakref.WeakValueDictionary[tuple[int, str], PrimitivesLink] = weakref.WeakValueDictionary()
_holding: set[PrimitivesLink] = set()
"""The links of processes that hold places, which stay theirs after the program has dropped all
objects that refer to the link, and links with withdrawn requests."""
_links_lock = threading.Lock()


def link_to(address: str, credentials: Credentials) -> PrimitivesLink:
    """Return this process's link to the dispatcher at "host:port". A process that was forked gets a
    link of its own."""
    with _links_lock:
        key = os.getpid(), address
        link = _links.get(key)
        if link is None:
            link = _links[key] = PrimitivesLink(address, credentials)
        return link
