"""Detects the loss of a parameter server at once, before any of its variables is used.

Each server gets a request that it answers when the session is closed. If the server is lost, the request ends early. A thread then sends
it again with the retries of every request to a parameter server (variables/client.py), and their result is the verdict. Where the strategy
has `recovery_s`, the retries go on for so long.

Not here: what a loss means for scheduled work (strategy_coordinator.py).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial

from zmqdist.errors import OpError, PSUnavailableError
from zmqdist.training.sessions import StrategySession
from zmqdist.variables.client import PsCall

log = logging.getLogger("zmqdist.training")

Lost = Callable[[PSUnavailableError], object]


def watch(session: StrategySession, lost: Lost) -> None:
    """Have `lost(error)` called in a thread, once for each server of the session that is lost before the session is closed."""
    for started in session.start_watches():
        started.when_done(partial(_begin, started, lost))


def _begin(started: PsCall, lost: Lost) -> None:
    if sys.is_finalizing():
        return
    try:
        threading.Thread(target=_judge, args=(started, lost), name="zmqdist-ps-lost", daemon=True).start()
    except RuntimeError:  # the client's thread has to go on: it serves all users of the client
        log.exception("the connection to a parameter server has ended, and no thread can be started to find out why")


def _judge(started: PsCall, lost: Lost) -> None:
    try:
        started.get_value()
    except PSUnavailableError as error:
        lost(error)
    except OpError:
        pass  # the session was closed meanwhile
    except BaseException:
        log.exception("the connection to a parameter server has ended, and finding out why failed")
