"""Checks of the token or the keys that a process will use when it is started: they must exist, be
private and complete, and match."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from zmqdist.errors import FailedPreconditionError
from zmqdist.observe.doctor.findings import Finding, ok, problem, warning
from zmqdist.transport import keys
from zmqdist.transport.credentials import KEYS_DIR_VARIABLE, TOKEN_FILE_VARIABLE, Credentials
from zmqdist.transport.keys import ROLES

_TOKEN_ADVICE = "a token is one line in a file of mode 0600, in a folder of mode 0700; remove a bad one, and the next start makes another"
_KEYS_ADVICE = (
    "copy the files of the folder that `zmqdist keygen` made once more, each with mode 0600"
)


def examine(credentials: Credentials) -> list[Finding]:
    """Check the key folder that processes will use, or the token if there is no key folder.
    transport/security.py has the rules."""
    if credentials.insecure:
        return [
            warning(
                "security",
                "switched off by --insecure",
                "make keys (zmqdist keygen DIR), or stay on 127.0.0.1",
            )
        ]
    # the order of transport/security.py: an explicit token wins over the environment's keys
    folder = credentials.keys_dir or (
        None if credentials.token_file else os.environ.get(KEYS_DIR_VARIABLE)
    )
    return key_folder(Path(folder)) if folder else [user_token(credentials.token_file)]


def user_token(path: str | None) -> Finding:
    """Check the token that a process would use. If the user's own token does not exist, this
    function does not create the token."""
    try:
        own = keys.default_path()
        if not path and not os.environ.get(TOKEN_FILE_VARIABLE) and not own.exists():
            return ok("token", f"{own} does not exist yet; the first start makes it")
        _, used = keys.user_token(path)
    except FailedPreconditionError as error:
        return problem("token", error.message, _TOKEN_ADVICE)
    return ok("token", f"{used} is private and complete; it does not expire")


def key_folder(folder: Path) -> list[Finding]:
    """Check a folder that `zmqdist keygen` has made, or a copy of some of its files."""
    subject = f"keys {folder}"
    if not folder.is_dir():
        return [
            problem(
                subject,
                "there is no such folder",
                f"`zmqdist keygen {folder}`, or name the right one",
            )
        ]
    findings = list(_openness(folder, subject))
    roles = [role for role in ROLES if (folder / f"{role}.key").exists()]
    server = ["server"] if (folder / "server.key").exists() else []
    if server:
        findings += _readable(_serving(folder, subject), subject)
    if roles:
        findings += _readable(_connecting(folder, subject, roles), subject)
    if not roles and not server:
        findings.append(
            problem(
                subject,
                "it has no keys",
                "copy server.pub and the key of a role there, or server.key and authorized "
                "for a server",
            )
        )
    return findings or [
        ok(
            subject,
            f"{', '.join(server + roles)}: private, complete and matching; they do not expire",
        )
    ]


def _openness(folder: Path, subject: str) -> Iterator[Finding]:
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        yield problem(
            subject,
            f"the folder belongs to user {status.st_uid}, this process runs as {os.geteuid()}",
            "use a folder of your own",
        )
    elif mode & 0o022:
        yield problem(
            subject,
            f"others may change what is in the folder (mode {mode:04o})",
            f"`chmod 700 {folder}`, and make new keys if they may have done so",
        )


def _serving(folder: Path, subject: str) -> Iterator[Finding]:
    pair = keys.load_role(folder, "server")
    authorized = keys.load_authorized(folder)
    public = keys.load_server_public(folder) if (folder / "server.pub").exists() else pair.public
    if public != pair.public:
        yield problem(
            subject,
            "server.pub is not the public half of server.key: clients that connect with "
            "it are refused",
            "copy both from the folder in which `zmqdist keygen` made them",
        )
    elif not authorized:
        yield problem(
            subject,
            "`authorized` admits no client",
            "add a line `role PUBLIC-KEY` for each, from the first lines of the key files",
        )


def _connecting(folder: Path, subject: str, roles: list[str]) -> Iterator[Finding]:
    keys.load_server_public(folder)
    authorized = keys.load_authorized(folder) if (folder / "authorized").exists() else None
    listeners = [role for role in roles if role in ("worker", "submit")]
    if authorized is None and listeners and not (folder / "server.key").exists():
        yield warning(
            subject,
            f"there is no `authorized` beside {listeners[0]}.key: with it no worker "
            f"can run and no program can schedule",
            "copy `authorized` there; it has no secrets",
        )
    for role in roles:
        pair = keys.load_role(folder, role)
        if authorized is not None and keys.decode_public(pair.public) not in authorized:
            yield problem(
                subject,
                f"{role}.key is not in `authorized` beside it: a server that uses "
                f"this folder refuses it",
                f"add the line `{role} {pair.public.decode()}` to "
                f"{folder / 'authorized'}, and start the servers again",
            )


def _readable(findings: Iterator[Finding], subject: str) -> Iterator[Finding]:
    """Yield the findings, and a problem if a key file cannot be used."""
    try:
        yield from findings
    except FailedPreconditionError as error:
        yield problem(subject, error.message, _KEYS_ADVICE)
