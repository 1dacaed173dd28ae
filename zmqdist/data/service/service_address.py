"""The `service` argument of `distribute` and similar functions: the address of a dispatcher, and
the secret for that dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmqdist.data.service.policy import PROTOCOLS
from zmqdist.errors import NotFoundError
from zmqdist.transport.credentials import Credentials, credentials_for


@dataclass(frozen=True)
class Service:
    """A dispatcher's address, and the paths of the files with the secret for this dispatcher.

    Attributes:
      address: "host:port".
      token_file, keys_dir, insecure: as in Credentials. The first two are paths and never secrets,
        because a pipeline contains these fields and is sent to other hosts.
    """

    address: str
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    @property
    def credentials(self) -> Credentials:
        """The Credentials for connections to the dispatcher and its workers. A path that does not
        exist on this host, for example because the pipeline was sent here from another host, is
        left out, so that the default path applies.
        """
        there = {
            name: path
            for name, path in (("token_file", self.token_file), ("keys_dir", self.keys_dir))
            if path is not None and Path(path).exists()
        }
        return Credentials(**there, insecure=self.insecure).vouched_by(self.address)


def service_of(service: Any) -> Service:
    """Return the Service for a `service` argument, which is an address, or an object with a
    `target` and perhaps `credentials`.

    Raises:
      ValueError: the argument is neither an address nor such an object.
      NotFoundError: the address has an unknown protocol.
    """
    address = getattr(service, "target", service)
    credentials = getattr(service, "credentials", None)
    plain_address = _address(address)
    if not isinstance(credentials, Credentials):
        credentials = credentials_for(plain_address)
    return Service(
        plain_address, credentials.token_file, credentials.keys_dir, credentials.insecure
    )


def _address(service: Any) -> str:
    """Return the "host:port" of an address in any form that a user may write."""
    if isinstance(service, tuple) and len(service) == 2:
        protocol, service = service
        service = f"{protocol}://{service}"
    if not isinstance(service, str):
        raise ValueError(
            f"`service` must be a string, but `service` was of type {type(service)}. "
            f"service={service}"
        )
    if not service:
        raise ValueError("`service` must not be empty")
    protocol, _, address = service.rpartition("://")
    if "://" in protocol:
        raise ValueError(f"Malformed `service` string has multiple '://': {service}.")
    if protocol not in ("", *PROTOCOLS):
        names = " ".join(PROTOCOLS)
        raise NotFoundError(
            f"No credentials factory has been registered for protocol {protocol}. The available "
            f"types are: [ {names} ]; "
            f'write "zmq://{address}"'
        )
    return address
