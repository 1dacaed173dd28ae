"""The doctor at this machine and at its secrets: each is broken for real where that can be done,
and the finding says what to do."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zmqdist.cluster import ClusterConfig
from zmqdist.observe.doctor import cluster, host, secrets
from zmqdist.observe.doctor.findings import Finding, healthy, ok, problem, warning
from zmqdist.transport import keys
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.port_probe import ZmqBuild


def check_single(findings: Finding | list[Finding], level: str, text: str, advice: str) -> None:
    """This finding, alone, with something to do unless all is well."""
    if isinstance(findings, list):
        (findings,) = findings
    assert (findings.level, bool(findings.advice)) == (level, level != "ok"), findings
    assert text in findings.message, findings.message
    assert advice in findings.advice, findings.advice


def test_finding_line_has_level_and_advice() -> None:
    assert ok("memory", "much").line() == "ok       memory: much"
    assert warning("a", "b\n c", "d").line() == "warning  a: b c: d"
    assert problem("\x1b[2J", "b", "d").line() == "problem  ?[2J: b: d"
    assert problem("a", "b", "c").record() == {
        "level": "problem",
        "subject": "a",
        "message": "b",
        "advice": "c",
    }


def test_problems_alone_are_unhealthy() -> None:
    assert healthy([])
    assert healthy([ok("a", "b"), warning("a", "b", "c")])
    assert not healthy([ok("a", "b"), problem("a", "b", "c")])


def test_host_is_healthy() -> None:
    findings = host.examine()
    assert healthy(findings), [finding.line() for finding in findings]
    assert {finding.subject for finding in findings} >= {
        "zmqdist",
        "ZeroMQ",
        "descriptors",
        "/proc",
        "memory",
        "loopback",
    }
    assert "NumPy" in findings[0].message


@pytest.mark.parametrize(
    ("build", "level", "text"),
    [
        (ZmqBuild("27.0", (4, 3, 5), True), "ok", "libzmq 4.3.5 with CURVE"),
        (ZmqBuild("27.0", (4, 2, 9), True), "problem", "libzmq 4.2.9, which is older than 4.3.0"),
        (
            ZmqBuild("27.0", (4, 3, 5), False),
            "warning",
            "built without CURVE: nothing but loopback",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_zeromq_version_and_curve(build: ZmqBuild, level: str, text: str) -> None:
    check_single(
        host.transport(build), level, text, "" if level == "ok" else "install pyzmq from a wheel"
    )


@pytest.mark.parametrize(
    ("limits", "expected", "level", "advice"),
    [
        ((1024, 4096), 1024, "ok", ""),
        ((256, 4096), 1024, "warning", "`ulimit -n 1024` in the shell that starts it"),
        ((1024, 4096), 3000, "problem", "`ulimit -n 3000` in the shell that starts it"),
        ((1024, 2000), 3000, "problem", "the hard limit is 2000"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 3000, "ok", ""),
        ((1024, resource.RLIM_INFINITY), 3000, "problem", "`ulimit -n 3000`"),
    ],
)
def test_descriptor_limit(
    limits: tuple[int, int], expected: int, level: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    check_single(host.descriptors(expected), level, "may be open", advice)


def test_descriptors_of_largest_process() -> None:
    def expected(**worker: Any) -> int:
        return cluster.descriptors_needed(
            ClusterConfig.from_dict({"name": "x", "jobs": {"worker": worker}, "program": "true"})
        )

    assert expected(count=2) == host.DESCRIPTORS_MIN
    assert expected(count=1000) > 5000
    assert expected(count=1, slots=2000) > 6000


def test_unreadable_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    check_single(host.proc(), "problem", "/proc cannot be read (Permission denied)", "mount it")


def test_shared_memory_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQDIST_ARENA", "off")
    check_single(
        host.shared_memory(), "warning", "switched off by ZMQDIST_ARENA=off", "unset ZMQDIST_ARENA"
    )


def test_shared_memory_that_others_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_READ_THROUGH_PROC", "raise PermissionError('not dumpable')")
    text = "a child could not open memory of this process (PermissionError: not dumpable): large arrays go through sockets"
    check_single(host.shared_memory(), "warning", text, "run all processes as one user and group")


def test_shared_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    check_single(host.shared_memory(), "warning", "there is none", "memfd_create")


def test_memory_that_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MEMORY_LOW", 2**60)
    check_single(host.memory(), "warning", "GiB are free", "end other programs")


def test_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    check_single(host.loopback(), "problem", "127.0.0.1 cannot be used", "`ip link set lo up`")


def test_proxies_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in host.PROXIES:
        monkeypatch.delenv(name, raising=False)
    assert host.proxies() == []
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    check_single(host.proxies(), "ok", "http_proxy set, which zmqdist ignores", "")


# -- secrets ---------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder; it is not there yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "zmqdist"


def test_doctor_makes_no_token(
    state: Path,
) -> None:
    check_single(
        secrets.examine(Credentials()), "ok", "does not exist yet; the first start makes it", ""
    )
    assert not state.exists()


def test_insecure_is_a_warning() -> None:
    check_single(
        secrets.examine(Credentials(insecure=True)),
        "warning",
        "switched off by --insecure",
        "zmqdist keygen",
    )


BROKEN_TOKENS: list[tuple[str, Callable[[Path], object], str]] = [
    ("well", lambda path: None, "is private and complete"),
    (
        "readable",
        lambda path: path.chmod(0o644),
        "is open to other users (mode 0644): make it private with `chmod 600`",
    ),
    ("folder open", lambda path: path.parent.chmod(0o755), "folder of the token, "),
    ("damaged", lambda path: path.write_text("short\n"), "is not a token: it must be one line"),
    ("a folder", lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
]


@pytest.mark.parametrize(
    ("subject", "breaks", "text"), BROKEN_TOKENS, ids=[row[0] for row in BROKEN_TOKENS]
)
def test_user_token(subject: str, breaks: Callable[[Path], object], text: str, state: Path) -> None:
    keys.create(state / "token")
    breaks(state / "token")
    level, advice = ("ok", "") if subject == "well" else ("problem", "mode 0600")
    check_single(secrets.examine(Credentials()), level, text, advice)


def test_named_token_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQDIST_TOKEN_FILE", str(tmp_path / "nowhere"))
    check_single(
        secrets.examine(Credentials()),
        "problem",
        "cannot read the token file",
        "the next start makes another",
    )


def _replaced(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    path.write_text(path.read_text().replace(old, new, 1))


def _of_another(folder: Path, name: str) -> None:
    second = folder.parent / "other"
    keys.keygen(second)
    (folder / name).write_bytes((second / name).read_bytes())


BROKEN_KEYS: list[tuple[str, Callable[[Path], object], str, str]] = [
    (
        "well",
        lambda folder: None,
        "server, client, observe, submit, worker, admin: private, complete and matching",
        "",
    ),
    (
        "a part",
        lambda folder: [
            item.unlink()
            for item in folder.glob("[!w]*")
            if item.name not in ("server.pub", "authorized")
        ],
        "worker: ",
        "",
    ),
    (
        "a part without public data",
        lambda folder: [
            item.unlink() for item in folder.glob("[!w]*") if item.name != "server.pub"
        ],
        "there is no `authorized` beside worker.key",
        "copy `authorized` there",
    ),
    (
        "no folder",
        lambda folder: folder.rename(folder.parent / "away"),
        "there is no such folder",
        "`zmqdist keygen ",
    ),
    (
        "no keys",
        lambda folder: [item.unlink() for item in folder.iterdir()],
        "it has no keys",
        "copy server.pub",
    ),
    (
        "others write",
        lambda folder: folder.chmod(0o777),
        "others may change what is in the folder",
        "`chmod 700 ",
    ),
    (
        "readable",
        lambda folder: (folder / "worker.key").chmod(0o640),
        "worker.key is open to other users",
        "mode 0600",
    ),
    (
        "damaged",
        lambda folder: (folder / "server.key").write_text("x"),
        "server.key is damaged",
        "keygen",
    ),
    (
        "no server.pub",
        lambda folder: (folder / "server.pub").unlink(),
        "there is no key file",
        "copy the files",
    ),
    (
        "other server.pub",
        lambda folder: _of_another(folder, "server.pub"),
        "not the public half of server.key",
        "copy both",
    ),
    (
        "other role",
        lambda folder: _of_another(folder, "client.key"),
        "client.key is not in `authorized`",
        "add the line",
    ),
    (
        "no authorized",
        lambda folder: (folder / "authorized").unlink(),
        "there is no key file",
        "copy the files",
    ),
    (
        "no client",
        lambda folder: (folder / "authorized").write_text("# x\n"),
        "`authorized` admits no client",
        "add a line",
    ),
    (
        "no role",
        lambda folder: _replaced(folder, "authorized", "client ", "guest "),
        "'guest' is not a role",
        "copy",
    ),
]


@pytest.mark.parametrize(
    ("subject", "breaks", "text", "advice"), BROKEN_KEYS, ids=[row[0] for row in BROKEN_KEYS]
)
def test_key_folder(
    subject: str, breaks: Callable[[Path], object], text: str, advice: str, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    keys.keygen(folder)
    breaks(folder)
    findings = secrets.examine(Credentials(keys_dir=str(folder)))
    level = {"well": "ok", "a part": "ok", "a part without public data": "warning"}.get(
        subject, "problem"
    )
    assert {finding.level for finding in findings} == {level}
    check_single(findings[0], level, text, advice)
    if level == "problem" and not folder.exists():
        (folder.parent / "away").rename(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_key_folder_of_other_user(tmp_path: Path) -> None:
    keys.keygen(tmp_path / "keys")
    os.chown(tmp_path / "keys", 12345, 12345)
    check_single(
        secrets.examine(Credentials(keys_dir=str(tmp_path / "keys"))),
        "problem",
        "belongs to user 12345",
        "of your own",
    )


def test_keys_of_environment_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQDIST_KEYS_DIR", str(tmp_path / "nowhere"))
    check_single(secrets.examine(Credentials()), "problem", "there is no such folder", "keygen")
