"""Where a component's secret is: given once, passed on to everything that it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqdist.transport.security import ClientSecurity, ServerSecurity

TOKEN_FILE_VARIABLE = "ZMQDIST_TOKEN_FILE"
KEYS_DIR_VARIABLE = "ZMQDIST_KEYS_DIR"
INSECURE_VARIABLE = "ZMQDIST_INSECURE"


@dataclass(frozen=True)
class Credentials:
    """Paths of secrets, never the secrets themselves. All None: the usual places (SECURITY.md)."""

    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    @classmethod
    def of_environment(cls) -> Credentials:
        """For a child process: what `environment` has put there is found by the security itself, but for `insecure`."""
        return cls(insecure=os.environ.get(INSECURE_VARIABLE) == "1")

    def server(self, host: str, role: str = "server") -> ServerSecurity:
        """For a socket that listens; `role`: whose key it shows, as in `server_security`."""
        from zmqdist.transport.security import server_security  # with ZeroMQ behind it: not before it is needed

        return server_security(
            host, role=role, token_file=self.token_file, keys_dir=self.keys_dir, insecure=self.insecure
        )

    def client(self, address: str, role: str, peer: bytes = b"") -> ClientSecurity:
        """For a socket that connects; `peer`: the public key that was told with the address, as in `client_security`."""
        from zmqdist.transport.security import client_security

        return client_security(
            address, role, peer=peer, token_file=self.token_file, keys_dir=self.keys_dir, insecure=self.insecure
        )

    def environment(self) -> dict[str, str]:
        """The present environment, with these paths in it, for a child process."""
        return {**os.environ, **self.variables()}

    def variables(self) -> dict[str, str]:
        """Return these paths as environment variables."""
        given = {TOKEN_FILE_VARIABLE: self.token_file, KEYS_DIR_VARIABLE: self.keys_dir}
        variables = {name: str(path) for name, path in given.items() if path is not None}
        return {**variables, INSECURE_VARIABLE: "1"} if self.insecure else variables
