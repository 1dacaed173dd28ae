"""The error text for a user who asks a launcher for more or fewer parameter servers. It names the
variables on each parameter server."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.transport.credentials import Credentials
from zmqdist.variables.client import client_of, release_client

ANSWER_S: Final = 1.0
"""Seconds in which all parameter servers have to answer with the names of their variables."""

NAMES_SHOWN_MAX: Final = 20


def scaling_problem(addresses: Mapping[int, str], credentials: Credentials) -> str:
    """Return why the number of parameter servers cannot change. The text has the names of the
    variables on each parameter server. This blocks until the parameter servers have replied, at
    most ANSWER_S seconds.
    """
    if not addresses:
        return (
            "this cluster has no parameter servers: write jobs.ps into its file and launch it again"
        )
    due = time.monotonic() + ANSWER_S
    held = "; ".join(
        f"ps:{index}: {_names(address, credentials, due)}" for index, address in addresses.items()
    )
    return (
        f"the number of parameter servers is fixed, because each holds variables ({held}): for "
        f"another number save a checkpoint, change "
        "jobs.ps in the file, and launch it again"
    )


def _names(address: str, credentials: Credentials, due: float) -> str:
    try:
        status = client_of(address, credentials).status(due).get_value()
    except errors.OpError:
        return "it does not reply"
    finally:
        with contextlib.suppress(errors.OpError):
            release_client(address)
    names = sorted({variable["name"] for variable in status["variables"]})
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return (", ".join(names[:NAMES_SHOWN_MAX]) + more) or "none now"
