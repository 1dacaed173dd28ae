"""The places of a component's secrets. The user sets the places once, and the component passes them
on to every process that it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from zmqdist.transport.peer_keys import Voucher
    from zmqdist.transport.security import ClientSecurity, ServerSecurity

TOKEN_FILE_VARIABLE = "ZMQDIST_TOKEN_FILE"
KEYS_DIR_VARIABLE = "ZMQDIST_KEYS_DIR"
INSECURE_VARIABLE = "ZMQDIST_INSECURE"
VOUCHER_VARIABLE = "ZMQDIST_VOUCHER"


@dataclass(frozen=True)
class Credentials:
    """Paths of secrets, never the secrets themselves. With the defaults, the secrets are at their
    usual places (SECURITY.md).

    Attributes:
      voucher: "host:port" of the dispatcher that vouches for the keys of peers. `None` means the
        dispatcher that the file `joined` names, or, without this file, no dispatcher.
    """

    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False
    voucher: str | None = field(default=None, compare=False)

    @classmethod
    def from_environment(cls) -> Credentials:
        """Return the credentials of a child process. These credentials have no paths, because
        `server_security` and `client_security` read the paths in the environment themselves.
        """
        return cls(
            insecure=os.environ.get(INSECURE_VARIABLE) == "1",
            voucher=os.environ.get(VOUCHER_VARIABLE),
        )

    def vouched_by(self, dispatcher: str) -> Credentials:
        """Return a copy of these credentials in which the dispatcher at "host:port" vouches for the
        keys of peers."""
        return replace(self, voucher=dispatcher.removeprefix("zmq://"))

    def server(self, host: str, role: str = "server") -> ServerSecurity:
        """Return the ServerSecurity of a listening socket. `role` decides which key the socket
        shows, as in `server_security`."""
        # imported here, because it loads ZeroMQ
        from zmqdist.transport.security import server_security

        return server_security(
            host,
            role=role,
            token_file=self.token_file,
            keys_dir=self.keys_dir,
            insecure=self.insecure,
            vouched=self._vouched,
        )

    def client(self, address: str, role: str, peer: bytes = b"") -> ClientSecurity:
        """Return the ClientSecurity of a connecting socket. `peer` is the public key that arrived
        with the address, as in `client_security`.
        """
        from zmqdist.transport.security import client_security

        return client_security(
            address,
            role,
            peer=peer,
            token_file=self.token_file,
            keys_dir=self.keys_dir,
            insecure=self.insecure,
            vouched=self._vouched,
        )

    def _vouched(self, folder: str | Path, role: str) -> Voucher | None:
        from zmqdist.transport.keys import load_joined
        from zmqdist.transport.peer_keys import voucher_for

        joined = load_joined(folder)
        if joined is None and role == "server":
            # this server's keys come from `keygen`: it judges peers by its file `authorized`
            return None
        dispatcher = self.voucher or (None if joined is None else joined.dispatcher)
        return (
            None
            if dispatcher is None
            else voucher_for(dispatcher, folder, role if joined is None else joined.role)
        )

    def environment(self) -> dict[str, str]:
        """Return the environment of a child process: a copy of this process's environment, with
        these credentials added."""
        return {**os.environ, **self.variables()}

    def variables(self) -> dict[str, str]:
        """Return these credentials as environment variables."""
        settings = {
            TOKEN_FILE_VARIABLE: self.token_file,
            KEYS_DIR_VARIABLE: self.keys_dir,
            VOUCHER_VARIABLE: self.voucher,
        }
        variables = {name: str(path) for name, path in settings.items() if path is not None}
        return {**variables, INSECURE_VARIABLE: "1"} if self.insecure else variables


own_clusters: Final[dict[str, Credentials]] = {}
"""The credentials of the open `local_cluster`s of this process, by "host:port"."""


def credentials_for(dispatcher: str) -> Credentials:
    """Return the credentials for the dispatcher at "host:port": those of a `local_cluster` of this
    process, or else those of the environment."""
    return own_clusters.get(dispatcher.replace("localhost:", "127.0.0.1:"), Credentials())
