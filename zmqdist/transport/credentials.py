"""Where a component's secret is: given once, passed on to everything that it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from zmqdist.transport.security import ClientSecurity, ServerSecurity
    from zmqdist.transport.voucher import Voucher

TOKEN_FILE_VARIABLE = "ZMQDIST_TOKEN_FILE"
KEYS_DIR_VARIABLE = "ZMQDIST_KEYS_DIR"
INSECURE_VARIABLE = "ZMQDIST_INSECURE"
VOUCHER_VARIABLE = "ZMQDIST_VOUCHER"


@dataclass(frozen=True)
class Credentials:
    """Paths of secrets, never the secrets themselves. All None: the usual places (SECURITY.md).

    Attributes:
      voucher: "host:port" of the dispatcher that vouches for the keys of peers; None: the one that the key folder names, if it does.
    """

    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False
    voucher: str | None = field(default=None, compare=False)

    @classmethod
    def of_environment(cls) -> Credentials:
        """For a child process: what `environment` has put there is found by the security itself, but for `insecure`."""
        return cls(insecure=os.environ.get(INSECURE_VARIABLE) == "1", voucher=os.environ.get(VOUCHER_VARIABLE))

    def vouched_by(self, dispatcher: str) -> Credentials:
        """The same secrets, with the dispatcher at "host:port" vouching for the keys of peers."""
        return replace(self, voucher=dispatcher.removeprefix("zmq://"))

    def server(self, host: str, role: str = "server") -> ServerSecurity:
        """For a socket that listens; `role`: whose key it shows, as in `server_security`."""
        from zmqdist.transport.security import server_security  # with ZeroMQ behind it: not before it is needed

        return server_security(
            host,
            role=role,
            token_file=self.token_file,
            keys_dir=self.keys_dir,
            insecure=self.insecure,
            vouched=self._vouched,
        )

    def client(self, address: str, role: str, peer: bytes = b"") -> ClientSecurity:
        """For a socket that connects; `peer`: the public key that was told with the address, as in `client_security`."""
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
        from zmqdist.transport.voucher import voucher_for

        joined = load_joined(folder)
        if joined is None and role == "server":  # it is its own judge
            return None
        dispatcher = self.voucher or (None if joined is None else joined.dispatcher)
        return None if dispatcher is None else voucher_for(dispatcher, folder, role if joined is None else joined.role)

    def environment(self) -> dict[str, str]:
        """The present environment, with these paths in it, for a child process."""
        return {**os.environ, **self.variables()}

    def variables(self) -> dict[str, str]:
        """Return these paths as environment variables."""
        given = {
            TOKEN_FILE_VARIABLE: self.token_file,
            KEYS_DIR_VARIABLE: self.keys_dir,
            VOUCHER_VARIABLE: self.voucher,
        }
        variables = {name: str(path) for name, path in given.items() if path is not None}
        return {**variables, INSECURE_VARIABLE: "1"} if self.insecure else variables
