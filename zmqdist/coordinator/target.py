"""Which dispatcher is meant, and with which secret."""

from __future__ import annotations

from typing import Any

from zmqdist.cluster.config import CONFIG_ENV, ClusterConfig
from zmqdist.dispatch.credentials import Credentials
from zmqdist.net.address import split

ACCEPTED = 'a DispatchServer, a local_cluster, "host:port" or "zmq://host:port", or nothing in a program that `zmqdist launch` started'


def resolve(target: Any) -> tuple[str, Credentials]:
    """ "host:port" and credentials of what a user gave.

    Raises:
      ValueError: it is none of what is accepted; the text says what is.
    """
    if target is None:
        return _of_environment()
    address = target if isinstance(target, str) else getattr(target, "target", None)
    if not isinstance(address, str):
        raise ValueError(f"cannot schedule on {target!r}: wanted {ACCEPTED}")
    address = address.removeprefix("zmq://")
    try:
        split(address)
    except Exception as error:
        raise ValueError(f"{error}: wanted {ACCEPTED}") from None
    credentials = getattr(target, "credentials", None)
    return address, credentials if isinstance(credentials, Credentials) else Credentials()


def _of_environment() -> tuple[str, Credentials]:
    config = ClusterConfig.from_environment()
    runtime = None if config is None else config.runtime
    if runtime is None:
        raise ValueError(f"no target was given and {CONFIG_ENV} names no running cluster: wanted {ACCEPTED}")
    return runtime.dispatcher.removeprefix("zmq://"), Credentials(runtime.token_file, runtime.keys_dir)
