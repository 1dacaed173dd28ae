"""`zmqdist call` and `zmqdist methods`: call a method of a server from the shell, and list its
methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zmqdist_cli.common import (
    ANSWER_S,
    Seconds,
    locate,
    printable,
    secret_options,
    target_options,
)

if TYPE_CHECKING:
    from zmqdist.errors import OpError
    from zmqdist.rpc import ZmqClient
    from zmqdist.rpc.methods import MethodInfo
    from zmqdist.transport.credentials import Credentials

FOREVER_MS: Final = 1_000_000_000
"""The time-out of a call without --timeout: the command waits for the result as long as the server
runs."""

CLIENTS_OWN: Final = frozenset({"timeout_in_ms", "out"})
"""Keyword arguments that the methods of a client use themselves. The command cannot pass arguments
with these names to a handler."""

ROLES: Final = ("client", "observe", "submit", "worker", "admin")


@click.command(short_help="List the methods of a server.")
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@target_options
def methods(address: str | None, *, as_json: bool, timeout_s: float, **secrets: Any) -> None:
    """List the methods of the server at ADDRESS, with their parameters, signatures, and the first
    line of each docstring.

    ADDRESS is the host:port of a zmqdist server: an RPC server, a dispatcher, a task of a cluster,
    or a worker without CURVE keys. The command cannot connect to a worker with CURVE keys, because
    it expects the key in server.pub, and such a worker has another key. Without ADDRESS, the
    command uses the dispatcher that ZMQDIST_CONFIG names.
    """
    from zmqdist.observe import status

    client, methods_by_name = connect(*locate(address, **secrets), "client", timeout_s)
    client.close()
    infos = methods_by_name.values()
    if as_json:
        click.echo(json.dumps([_record(info) for info in infos], indent=2))
        return
    lines = [(printable(str(info), "\n"), status.printable(info.doc)) for info in infos]
    width = min(60, max((len(line) for line, _ in lines), default=0))
    for line, doc in lines:
        click.echo(f"{line:<{width}}  {doc}".rstrip())


@click.command(
    short_help="Call a method of a server.", context_settings={"ignore_unknown_options": True}
)
@click.argument("address")
@click.argument("method")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as one line of JSON, with arrays as nested lists.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Save the result in FILE. Its name decides the form: .npy for an array, .npz for a dict "
    "of arrays, .json for any value; with any "
    "other name the result must be bytes.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    metavar="SECONDS",
    help=f"Longest time to wait for the result. The connection may take {ANSWER_S:g} s at most.  "
    f"[default: no limit]",
)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="client",
    show_default=True,
    help="Connect with the rights of this role.",
)
@click.option("--traceback", is_flag=True, help="Also print the remote traceback of an error.")
@secret_options
@click.pass_context
def call(
    context: click.Context,
    /,
    address: str,
    method: str,
    words: tuple[str, ...],
    *,
    as_json: bool,
    output: Path | None,
    timeout_s: float | None,
    role: str,
    traceback: bool,
    **secrets: Any,
) -> None:
    """Call METHOD of the server at ADDRESS and print its result. For a streaming method, print each
    item as it arrives.

    \b
    Each of ARGS is one of these:
      3  2.5  true  null  NaN  "text"  [1, 2]  {"a": 1}    JSON
      @a.npy      the array in a file; also .npz, .json; other files: bytes
      NAME=ARG    an argument by name
      text        any other word is a string

    If the method has an input signature, lists become arrays of its dtype.
    """
    from zmqdist.errors import OpError

    if output is not None and as_json:
        raise click.UsageError("--output saves the answer and --json prints it: give one of them")
    address_and_credentials = locate(address, **secrets)
    try:
        client, methods_by_name = connect(
            *address_and_credentials, role, min(timeout_s or ANSWER_S, ANSWER_S)
        )
        with client:
            info = _find(methods_by_name, method, client.address)
            _call(client, info, words, as_json=as_json, output=output, timeout_s=timeout_s)
    except OpError as error:
        from zmqdist_cli.main import exit_code

        report_error(context.command_path, error, traceback=traceback)
        context.exit(int(exit_code(error)))


def _call(
    client: ZmqClient,
    info: MethodInfo,
    words: tuple[str, ...],
    *,
    as_json: bool,
    output: Path | None,
    timeout_s: float | None,
) -> None:
    from zmqdist_cli import values

    if info.streaming and output is not None:
        raise click.UsageError(
            f"{info.name} is a streaming method, and --output saves a single answer"
        )
    args, named = values.arguments(words)
    own = (
        CLIENTS_OWN - {"out"} if info.streaming else CLIENTS_OWN
    )  # a stream has no `out`, so a generator may have a parameter `out`
    for name in own & named.keys():
        raise click.UsageError(
            f"{name}= would go to the client: pass the argument {name} of {info.name} by position"
        )
    specs = info.input_signature or ()
    specs_by_name = (
        {} if info.signature is None else dict(zip(info.signature.parameters, specs, strict=False))
    )
    args = [*map(values.shaped_like, specs, args), *args[len(specs) :]]
    named = {
        name: values.shaped_like(specs_by_name.get(name), value) for name, value in named.items()
    }
    timeout_in_ms = FOREVER_MS if timeout_s is None else max(1, round(timeout_s * 1000))
    start = client.stubs(info)[0]
    try:
        pending = start(*args, timeout_in_ms=timeout_in_ms, **named)
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"{info.name}: {error}; it is {info}") from None
    if info.streaming:
        with pending:
            for item in pending:
                click.echo(values.shown(item, as_json=as_json))
        return
    value = pending.get_value()
    if output is not None:
        click.echo(f"{output}: {values.save(value, output)}", err=True)
    else:
        click.echo(values.shown(value, as_json=as_json))


def connect(
    address: str, credentials: Credentials, role: str, timeout_s: float
) -> tuple[ZmqClient, dict[str, MethodInfo]]:
    """Return a connected client and the server's methods by name. Raises OpError if the server is
    unreachable or refuses the client."""
    from zmqdist import errors
    from zmqdist.rpc import ZmqClient

    security = credentials.client(address, role)
    client = ZmqClient(address, "zmqdist", timeout_in_ms=round(timeout_s * 1000), security=security)
    try:
        return client, client.methods()
    except errors.DeadlineExceededError:
        client.close()
        message = f"no server answered at {address} within {timeout_s:g} s: `zmqdist doctor {address}` says why"
        raise errors.UnavailableError(message) from None
    except BaseException:
        client.close()
        raise


def _find(methods_by_name: dict[str, MethodInfo], method: str, address: str) -> MethodInfo:
    from zmqdist.field_types import did_you_mean

    if method in methods_by_name:
        return methods_by_name[method]
    hint = did_you_mean(method, methods_by_name)
    raise click.UsageError(f"no method {method!r} at {address} ({hint})")


def report_error(command: str, error: OpError, *, traceback: bool) -> None:
    """Print an error as one line `CODE: message`. With `traceback=True`, also print the traceback
    that the server has sent."""
    from zmqdist import errors
    from zmqdist.rpc.handler_errors import TRACEBACK
    from zmqdist_cli.main import report

    message, _, trace = error.message.partition(TRACEBACK)
    report(f"{command}: {errors.name_of(error.error_code)}: {message}")
    if traceback and trace:
        click.echo("\n".join(map(printable, trace.splitlines())), err=True)


def _record(info: MethodInfo) -> dict[str, Any]:
    parameters = info.signature.parameters.values() if info.signature is not None else None
    return {
        "name": info.name,
        "call": str(info),
        "parameters": None
        if parameters is None
        else [
            {
                "name": parameter.name,
                "kind": parameter.kind.description,
                "default": None if parameter.default is parameter.empty else str(parameter.default),
            }
            for parameter in parameters
        ],
        "input_signature": info.input_signature
        if info.input_signature is None
        else str(info.input_signature),
        "output_signature": info.output_signature
        if info.output_signature is None
        else str(info.output_signature),
        "streaming": info.streaming,
        "batch": info.batch,
        "doc": info.doc,
    }
