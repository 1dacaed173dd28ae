"""`zmqdist keygen DIR`: write the CURVE keys of a cluster as files."""

from __future__ import annotations

from pathlib import Path

import click

from zmqdist.errors import OpError
from zmqdist.transport import keys
from zmqdist_cli.exit_codes import ExitCode


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--force",
    is_flag=True,
    help="Replace existing keys. A server refuses the old keys after its next start.",
)
@click.pass_context
def keygen(context: click.Context, folder: Path, force: bool) -> None:
    """Make the CURVE keys of a cluster in the folder DIR.

    The folder gets mode 0700. Servers need the files server.key and authorized. A process that
    connects to them needs server.pub and the key of its role (client, submit, worker or admin);
    workers, and programs that schedule functions, also need authorized. Copy the files to each
    host, and set ZMQDIST_KEYS_DIR to their folder there.
    """
    try:
        keys.keygen(folder, force=force)
    except OpError as error:
        click.echo(f"zmqdist keygen: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    click.echo(
        f"ok: keys in {folder}; keep them secret, and set {keys.KEYS_DIR_VARIABLE}={folder.absolute()}"
    )
