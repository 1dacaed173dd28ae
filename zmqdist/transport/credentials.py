"""Where a component finds its secrets: set once, and passed on to every process that it starts."""

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
    """Paths of secrets, never the secrets themselves. With the defaults, the secrets are at their usual places (SECURITY.md)."""

    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    @classmethod
    def from_environment(cls) -> Credentials:
        """Return the credentials of a child process. The paths that `environment` has set need no field: the security reads them itself."""
        return cls(insecure=os.environ.get(INSECURE_VARIABLE) == "1")

    def server(self, host: str, role: str = "server") -> ServerSecurity:
        """Return the security of a listening socket. `role` says whose key it shows, as in `server_security`."""
        from zmqdist.transport.security import server_security  # imported late, because it imports ZeroMQ

        return server_security(
            host, role=role, token_file=self.token_file, keys_dir=self.keys_dir, insecure=self.insecure
        )

    def client(self, address: str, role: str, peer: bytes = b"") -> ClientSecurity:
        """Return the security of a connecting socket. `peer` is the public key that came with the address, as in `client_security`."""
        from zmqdist.transport.security import client_security

        return client_security(
            address, role, peer=peer, token_file=self.token_file, keys_dir=self.keys_dir, insecure=self.insecure
        )

    def environment(self) -> dict[str, str]:
        """Return a copy of this process's environment with these paths in it, for a child process."""
        return {**os.environ, **self.variables()}

    def variables(self) -> dict[str, str]:
        """Return these paths as environment variables."""
        given = {TOKEN_FILE_VARIABLE: self.token_file, KEYS_DIR_VARIABLE: self.keys_dir}
        variables = {name: str(path) for name, path in given.items() if path is not None}
        return {**variables, INSECURE_VARIABLE: "1"} if self.insecure else variables
