"""The loss of a parameter server, known at once, and not only when somebody uses one of its variables.

A question to each server that is answered when the session is closed. It ends early with the server: then, in a thread, it is asked
again as everything is that is asked of a server (variables/client.py), and what comes of that is the verdict. A server that is to be
recovered is waited for as long.

Not here: what a loss means for whoever schedules (strategy_coordinator.py).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial

from zmqdist.errors import OpError, PSUnavailableError
from zmqdist.training.sessions import StrategySession
from zmqdist.variables.client import Started

log = logging.getLogger("zmqdist.training")

Lost = Callable[[PSUnavailableError], object]


def watch(session: StrategySession, lost: Lost) -> None:
    """Have `lost(error)` called in a thread, once for each server of the session that is lost before the session is closed."""
    for started in session.start_watches():
        started.when_done(partial(_begin, started, lost))


def _begin(started: Started, lost: Lost) -> None:
    if sys.is_finalizing():
        return
    try:
        threading.Thread(target=_judge, args=(started, lost), name="zmqdist-ps-lost", daemon=True).start()
    except RuntimeError:  # this is a thread of the client, which serves others, too
        log.exception("a connection to a parameter server has ended, and no thread can be started to see why")


def _judge(started: Started, lost: Lost) -> None:
    try:
        started.get_value()
    except PSUnavailableError as error:
        lost(error)
    except OpError:
        pass  # the session was closed meanwhile
    except BaseException:
        log.exception("a connection to a parameter server has ended, and it could not be seen why")
