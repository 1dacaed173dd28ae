"""Which service a user means, and with which secret."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmqdist.data.service.worker_selection import PROTOCOLS
from zmqdist.errors import NotFoundError
from zmqdist.transport.credentials import Credentials


@dataclass(frozen=True)
class Service:
    """A dispatcher, and where the secret for it is.

    Attributes:
      address: "host:port".
      token_file, keys_dir, insecure: as in Credentials: paths, never secrets.
    """

    address: str
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    @property
    def credentials(self) -> Credentials:
        """Those of the paths; of the usual places where these are not on this machine, as for a pipeline that was sent to another."""
        there = {
            name: path
            for name, path in (("token_file", self.token_file), ("keys_dir", self.keys_dir))
            if path is not None and Path(path).exists()
        }
        return Credentials(**there, insecure=self.insecure).vouched_by(self.address)


def service_of(service: Any) -> Service:
    """What `distribute` and its like are given: an address, or something that has a `target` and `credentials`.

    Raises:
      ValueError: it is none of these.
      NotFoundError: an address of another protocol.
    """
    address = getattr(service, "target", service)
    credentials = getattr(service, "credentials", None)
    found = _address(address)
    if not isinstance(credentials, Credentials):
        return Service(found)
    return Service(found, credentials.token_file, credentials.keys_dir, credentials.insecure)


def _address(service: Any) -> str:
    """ "host:port" of what a user calls a service."""
    if isinstance(service, tuple) and len(service) == 2:
        protocol, service = service
        service = f"{protocol}://{service}"
    if not isinstance(service, str):
        raise ValueError(f"`service` must be a string, but `service` was of type {type(service)}. service={service}")
    if not service:
        raise ValueError("`service` must not be empty")
    protocol, _, address = service.rpartition("://")
    if "://" in protocol:
        raise ValueError(f"Malformed `service` string has multiple '://': {service}.")
    if protocol not in ("", *PROTOCOLS):
        known = " ".join(PROTOCOLS)
        text = (
            f"No credentials factory has been registered for protocol {protocol}. The available types are: [ {known} ]"
        )
        raise NotFoundError(text)
    return address
