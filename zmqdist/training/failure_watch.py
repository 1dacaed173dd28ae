"""Detects the loss of a parameter server, even if no code uses its variables.

Each server gets a request that it answers only when the session is closed. If the connection to the
server is lost, the request ends early. A thread then repeats the request by the rules for all
requests to parameter servers (variables/client.py). If all repetitions fail, the thread reports the
server as lost. If the strategy has `recovery_s`, the thread repeats the request for that time.

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
    """Watch the servers of a session. For each server that is lost before the session is closed, a
    thread calls `lost(error)` once."""
    for started in session.start_watches():
        started.when_done(partial(_begin, started, lost))


def _begin(started: PsCall, lost: Lost) -> None:
    if sys.is_finalizing():
        return
    try:
        threading.Thread(
            target=_judge, args=(started, lost), name="zmqdist-ps-lost", daemon=True
        ).start()
    except RuntimeError:
        # raise nothing in this thread of the client, because it serves all users of the client
        log.exception(
            "the connection to a parameter server has ended, and no thread can be started to find "
            "out why"
        )


def _judge(started: PsCall, lost: Lost) -> None:
    try:
        started.get_value()
    except PSUnavailableError as error:
        lost(error)
    except OpError:
        pass  # any other error means that the session was closed, which is no loss
    except BaseException:
        log.exception("the connection to a parameter server has ended, and finding out why failed")
