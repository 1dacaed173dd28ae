"""`zmqdist keygen DIR`: write the CURVE keys of a cluster as files."""

from __future__ import annotations

from pathlib import Path

import click

from zmqdist.errors import OpError
from zmqdist.transport import keys
from zmqdist_cli.exit_codes import ExitCode


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace existing keys; processes that have the old ones are locked out.")
@click.pass_context
def keygen(context: click.Context, folder: Path, force: bool) -> None:
    """Make the CURVE keys of a cluster in the folder DIR.

    The folder gets mode 0700. Servers need server.key and authorized; a process that connects needs server.pub and the key of its role
    (client, submit, worker or admin). Set ZMQDIST_KEYS_DIR to the folder on every host.
    """
    try:
        keys.keygen(folder, force=force)
    except OpError as error:
        click.echo(f"zmqdist keygen: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    click.echo(f"ok: keys in {folder}; keep them secret, and set {keys.ENVIRONMENT}={folder.absolute()}")
