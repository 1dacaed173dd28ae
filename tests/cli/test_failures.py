"""What goes wrong: one line on standard error that says who, where and what to do, and the exit
code of the table."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import zmqdist as zd
from tests.cli.helpers import run, run_here
from zmqdist import errors
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.launch.folders import RunFolder, write_private
from zmqdist.observe.peer import serving
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist_cli.main import exit_code, main
from zmqdist_cli.main import report as tell

CLUSTER = """\
name: test
jobs:
  dispatcher: {address: 127.0.0.1:0}
  worker: {count: 1}
program: PROGRAM
"""


@pytest.fixture
def free() -> Iterator[str]:
    """An address at which nobody listens, and nobody will: it is bound."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cluster files, a token and keys that fit nothing."""
    tmp_path = tmp_path_factory.mktemp("files")
    (tmp_path / "launcher.yaml").write_text(
        CLUSTER.replace("PROGRAM", "python x.py") + "launcher: nomad\n"
    )
    (tmp_path / "noport.yaml").write_text(CLUSTER.replace("PROGRAM", "python x.py"))
    (tmp_path / "program.yaml").write_text(CLUSTER.replace("PROGRAM", "no-such-program-here"))
    (tmp_path / "key.yaml").write_text(
        CLUSTER.replace("PROGRAM", "python x.py").replace("count: 1", "cuont: 1")
    )
    (tmp_path / "curve.yaml").write_text(
        CLUSTER.replace("PROGRAM", "python x.py") + "security: {curve: true}\n"
    )
    (tmp_path / "disk.yaml").write_text(
        CLUSTER.replace(":0}", ":0, fault_tolerant_mode: true}").replace("PROGRAM", "python x.py")
    )
    (tmp_path / "nat.yaml").write_text(
        CLUSTER.replace(":0}", ":5000, advertise: 192.0.2.1}").replace("PROGRAM", "python x.py")
    )
    (tmp_path / "nokeys.yaml").write_text(
        CLUSTER.replace("PROGRAM", "python x.py") + "security: {keys: nowhere}\n"
    )
    (tmp_path / "nocode.yaml").write_text(
        CLUSTER.replace("PROGRAM", "python x.py") + "code: [nofile.py]\n"
    )
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "token").write_text("t" * 43 + "\n")
    (tmp_path / "token").chmod(0o600)
    assert run_here("keygen", str(tmp_path / "keys")).code == 0
    return tmp_path


USAGE: list[tuple[str, str]] = [
    ("stat 127.0.0.1:1", "zmqdist: no such command 'stat' (did you mean status?)"),
    ("xyzzy", "zmqdist: no such command 'xyzzy' (there are: launch,"),
    ("--bad", f"zmqdist: {click.NoSuchOption('--bad').format_message()}"),
    ("status", "zmqdist status: which TARGET?"),
    ("status nowhere", "zmqdist status: 'nowhere' is not an address: no port; write host:port"),
    ("status 127.0.0.1:99999", "zmqdist status: '127.0.0.1:99999' is not an address"),
    ("status 127.0.0.1:1 --timeout 0", "'0' is not a number of seconds: wanted more than 0"),
    ("status 127.0.0.1:1 --timeout nan", "'nan' is not a number of seconds"),
    (
        "status 10.1.2.3:5050",
        "zmqdist status: other hosts can reach 10.1.2.3, and no CURVE keys are given",
    ),
    ("top 127.0.0.1:1 --interval -1", "zmqdist top: Invalid value for '--interval'"),
    ("dispatcher --port 99999", "zmqdist dispatcher: Invalid value for '--port'"),
    ("dispatcher --port five", "zmqdist dispatcher: Invalid value for '--port'"),
    ("dispatcher --lease nan", "zmqdist dispatcher: Invalid value for '--lease'"),
    ("dispatcher --attempts 0", "zmqdist dispatcher: Invalid value for '--attempts'"),
    ("dispatcher --host 0.0.0.0", "other hosts can reach 0.0.0.0, and no CURVE keys are given"),
    ("dispatcher --token-file nowhere", "cannot read the token file nowhere"),
    ("dispatcher --keys nowhere", "there is no key file nowhere"),
    (
        "dispatcher --advertise x:99999",
        "Invalid value for '--advertise': bad address 'x:99999': port 99999 is above",
    ),
    (
        "dispatcher --advertise [::1:5",
        "Invalid value for '--advertise': bad address '[::1:5': the bracket is not",
    ),
    (
        "dispatcher --advertise foo/bar:1",
        "Invalid value for '--advertise': bad address 'foo/bar:1': 'foo/bar' is not",
    ),
    (
        "dispatcher --advertise 0.0.0.0",
        "Invalid value for '--advertise': bad address '0.0.0.0': no process can",
    ),
    (
        "dispatcher --advertise :5",
        "Invalid value for '--advertise': bad address ':5': no process can",
    ),
    (
        "worker --dispatcher 127.0.0.1:1 --advertise foo/bar",
        "Invalid value for '--advertise': bad address 'foo/bar'",
    ),
    ("dispatcher --config curve.yaml", "curve.yaml wants CURVE and names no keys"),
    ("dispatcher --config disk.yaml", "fault tolerant mode without configuring a work dir"),
    ("dispatcher --fault-tolerant", "fault tolerant mode without configuring a work dir"),
    ("dispatcher --config nofile.yaml", "nofile.yaml:1: (file): cannot be read"),
    ("worker", "zmqdist worker: which --dispatcher?"),
    ("worker --dispatcher 127.0.0.1:1 --slots 0", "zmqdist worker: Invalid value for '--slots'"),
    ("worker --dispatcher 127.0.0.1:1 --slots many", "zmqdist worker: Invalid value for '--slots'"),
    ("worker --dispatcher 127.0.0.1:1 --index -1", "zmqdist worker: Invalid value for '--index'"),
    ("worker --config key.yaml", "key.yaml:4: jobs.worker.cuont:"),
    # off loopback: it goes where the file advertises
    ("worker --config nat.yaml", "and no CURVE keys are given"),
    (
        "worker --config noport.yaml",
        "noport.yaml has no fixed port for the dispatcher: pass --dispatcher",
    ),
    ("drain 127.0.0.1:1", "zmqdist drain: '127.0.0.1:1' is not the name of a worker"),
    (
        "drain 127.0.0.1:1 worker",
        "zmqdist drain: 'worker' is not the name of a worker: wanted JOB:INDEX",
    ),
    ("drain a b c", "zmqdist drain: wanted [TARGET] WORKER"),
    ("stack", "zmqdist stack: wanted [TARGET] WORKER, as 127.0.0.1:5050 worker:0"),
    ("stack 127.0.0.1:1", "zmqdist stack: '127.0.0.1:1' is not the name of a worker"),
    ("stack 127.0.0.1:1 wrong", "zmqdist stack: 'wrong' is not the name of a worker"),
    ("logs 127.0.0.1:1 wrong", "zmqdist logs: 'wrong' is not the name of a worker"),
    ("profile 127.0.0.1:1 -o no/file", "zmqdist profile: -o no/file: wanted a file, in a folder"),
    ("profile 127.0.0.1:1 -o .", "zmqdist profile: -o .: wanted a file, in a folder"),
    ("scale", "zmqdist scale: wanted [TARGET] worker=COUNT, as 127.0.0.1:5050 worker=8"),
    ("scale 127.0.0.1:1 8", "zmqdist scale: '8' is no size: wanted worker=COUNT, as worker=8"),
    (
        "scale 127.0.0.1:1 worker=+2",
        "zmqdist scale: 'worker=+2' is no size: wanted worker=COUNT, as worker=8",
    ),
    ("scale worker=2", "zmqdist scale: which TARGET?"),
    ("shutdown 127.0.0.1:1 --grace -1", "zmqdist shutdown: Invalid value for '--grace'"),
    ("launch", "zmqdist launch: Missing argument 'CONFIG'"),
    (
        "launch program.yaml --attach 1",
        "zmqdist launch: --attach JOB follows a job that was submitted before: give neither",
    ),
    (
        "launch noport.yaml --detach",
        "--detach submits a job of Slurm without following it, but launcher: local submits no job",
    ),
    ("launch nofile.yaml", "zmqdist launch: nofile.yaml:1: (file): cannot be read"),
    ("launch key.yaml", "key.yaml:4: jobs.worker.cuont:"),
    (
        "launch launcher.yaml",
        "launcher.yaml:6: launcher: expected local, ssh, slurm, kubernetes or ray, got 'nomad'",
    ),
    (
        "launch program.yaml",
        "zmqdist launch: program.yaml: program: 'no-such-program-here' is not found",
    ),
    ("validate", "zmqdist validate: which CONFIG?"),
    (
        "validate program.yaml",
        "zmqdist validate: program.yaml: program: 'no-such-program-here' is not found",
    ),
    (
        "validate disk.yaml",
        "zmqdist validate: disk.yaml: Cannot enable fault tolerant mode without configuring",
    ),
    ("validate nokeys.yaml", "zmqdist validate: nokeys.yaml: there is no key file "),
    ("validate nocode.yaml", "zmqdist validate: nocode.yaml: code: 'nofile.py' does not exist in "),
    (
        "validate pipe.yaml",
        "zmqdist validate: pipe.yaml:1: (file): cannot be read: it is not a regular file",
    ),
    (
        "launch pipe.yaml",
        "zmqdist launch: pipe.yaml:1: (file): cannot be read: it is not a regular file",
    ),
    (
        "server --spec @pipe.yaml",
        "zmqdist server: --spec: pipe.yaml cannot be read: it is not a regular file",
    ),
    ("doctor nowhere", "zmqdist doctor: 'nowhere' is not an address"),
    ("doctor nofile.yaml", "zmqdist doctor: nofile.yaml:1: (file): cannot be read"),
    ("doctor key.yaml", "key.yaml:4: jobs.worker.cuont:"),
    ("bench --serve 127.0.0.1:0 --quick", "zmqdist bench: --serve takes no other option"),
]


def assert_one_line(err: str) -> None:
    assert err.count("\n") == 1, err
    assert err.endswith("\n")


@pytest.mark.parametrize(("line", "report"), USAGE, ids=[line for line, _ in USAGE])
def test_usage_or_file_mistake_is_one_line(
    line: str,
    report: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    code = main(line.split())
    output = capsys.readouterr()
    assert (code, output.out) == (ExitCode.USAGE, ""), output.err
    assert report in output.err
    assert_one_line(output.err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UnavailableError(None, None, ""), ExitCode.UNAVAILABLE),
        (errors.DeadlineExceededError(None, None, ""), ExitCode.UNAVAILABLE),
        (errors.UnauthenticatedError(None, None, ""), ExitCode.REFUSED),
        (errors.PermissionDeniedError(None, None, ""), ExitCode.REFUSED),
        (errors.AlreadyExistsError(None, None, ""), ExitCode.REFUSED),
        (errors.InvalidArgumentError(None, None, ""), ExitCode.USAGE),
        (errors.FailedPreconditionError(None, None, ""), ExitCode.USAGE),
        (errors.UnknownError(None, None, ""), ExitCode.PROGRAM_FAILED),
        (errors.ConfigError("f", 1, "k", "p"), ExitCode.CONFIG),
        (NotImplementedError(), ExitCode.CONFIG),
    ],
    ids=lambda value: type(value).__name__,
)
def test_expected_error_has_exit_code(error: Exception, code: ExitCode) -> None:
    assert exit_code(error) == code


def test_long_message_printed_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell("first\n  second\n")
    assert capsys.readouterr().err == "first second\n"


@pytest.mark.parametrize("command", ["status", "top", "shutdown", "drain"])
def test_silent_address_ends_command_in_time(command: str, free: str) -> None:
    words = [command, free, *(["worker:0"] if command == "drain" else []), "--timeout", "0.5"]
    result = (run if command == "status" else run_here)(*words)
    assert result.code == ExitCode.UNAVAILABLE
    assert (
        f"zmqdist {command}: no dispatcher answered at {free} within 0.5 s: is it running"
        in result.err
    )
    assert_one_line(result.err)


def test_unknown_dispatcher_name_is_reported() -> None:
    result = run_here("status", "no-such-host.invalid:5050", "--timeout", "0.5", "--insecure")
    assert result.code == ExitCode.UNAVAILABLE
    assert (
        "zmqdist status: no-such-host.invalid:5050: the name 'no-such-host.invalid' cannot be "
        "looked up (" in result.err
    )
    assert_one_line(result.err)


def test_orphan_worker_ends_after_limit(free: str) -> None:
    result = run("worker", "--dispatcher", free, "--orphan-limit", "0.5")
    assert (result.code, result.out) == (ExitCode.UNAVAILABLE, "")
    assert f"worker: worker of {free}: no dispatcher for 0.5 s" in result.err
    assert_one_line(result.err)


def test_waiting_worker_names_dispatcher(
    free: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqdist.scheduling.worker.runtime.FIRST_CONTACT_LOG_S", 0.1)
    result = run_here("worker", "--dispatcher", free, "--threads", "--orphan-limit", "1")
    assert result.code == ExitCode.UNAVAILABLE
    output = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"worker waits for the dispatcher at {free}: no process listens there" in output


def test_used_port_is_named(dispatcher_here: str) -> None:
    address = dispatcher_here
    result = run_here("dispatcher", "--port", address.rpartition(":")[2])
    assert (result.code, result.out) == (ExitCode.PROGRAM_FAILED, "")
    assert f"could not bind {address}: the port is in use" in result.err
    assert_one_line(result.err)


@pytest.mark.parametrize(
    "command", ["status {}", "shutdown {}", "drain {} worker:0", "worker --dispatcher {}"]
)
def test_wrong_token_is_refused_at_once(command: str, dispatcher_here: str, folder: Path) -> None:
    address = dispatcher_here
    result = run_here(*command.format(address).split(), "--token-file", "token", cwd=folder)
    assert (result.code, result.out) == (ExitCode.REFUSED, ""), result.err
    assert f"the server at {address} refused this side" in result.err
    assert "tttt" not in result.err
    assert_one_line(result.err)


@pytest.mark.parametrize("command", ["status {}", "worker --dispatcher {}"])
def test_keys_in_place_of_token_are_reported(
    command: str, dispatcher_here: str, folder: Path
) -> None:
    address = dispatcher_here
    result = run_here(*command.format(address).split(), "--keys", "keys", cwd=folder)
    assert (result.code, result.out) == (ExitCode.USAGE, ""), result.err
    assert f"the server at {address} uses the user's token" in result.err
    assert_one_line(result.err)


def test_wrong_key_is_refused(folder: Path) -> None:
    assert run_here("keygen", str(folder / "others")).code == 0
    with zd.DispatchServer(DispatcherConfig(keys_dir=str(folder / "keys"))) as server:
        assert run_here("status", server.address, "--keys", "keys", cwd=folder).code == 0
        result = run_here("status", server.address, "--keys", "others", cwd=folder)
    assert (result.code, result.out) == (ExitCode.REFUSED, ""), result.err
    assert_one_line(result.err)


def test_absent_worker_cannot_be_drained(dispatcher_here: str) -> None:
    address = dispatcher_here
    result = run_here("drain", address, "worker:3")
    assert (result.code, result.out) == (ExitCode.PROGRAM_FAILED, "")
    assert (
        result.err
        == "zmqdist drain: no worker worker:3 is registered here; the registered workers are: "
        "none\n"
    )


@pytest.fixture
def running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, str], None]]:
    """Stands in for a launcher: makes the folder that a launched cluster has on this host, without
    its processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.ExitStack() as folders:

        def run_cluster(port: int, secret: str) -> None:
            folder = RunFolder()
            folders.callback(folder.close)
            runtime = f"runtime: {{dispatcher: 'zmq://127.0.0.1:{port}', {secret}}}\n"
            write_private(
                folder.path, "cluster.yaml", CLUSTER.replace("PROGRAM", "python x.py") + runtime
            )

        yield run_cluster


def test_cluster_file_names_running_cluster(
    running: Callable[[int, str], None], folder: Path, free: str
) -> None:
    (folder / "test.yaml").write_text(CLUSTER.replace("PROGRAM", "python x.py"))
    command = ["status", str(folder / "test.yaml"), "--timeout", "0.1"]
    assert "no cluster 'test' of" in run_here(*command).err
    running(int(free.split(":")[1]), f"token_file: {folder / 'token'}")
    assert f"zmqdist status: no dispatcher answered at {free}" in run_here(*command).err
    running(2, f"keys_dir: {folder / 'keys'}")
    result = run_here(*command)
    assert (result.code, result.out) == (ExitCode.USAGE, ""), result.err
    assert (
        "2 clusters 'test' run on this host: name one by its address, with the option for its "
        "secret: " in result.err
    )
    for target in (
        f"{free} --token-file {folder / 'token'}",
        f"127.0.0.1:2 --keys {folder / 'keys'}",
    ):
        assert target in result.err
    assert_one_line(result.err)


def test_rpc_server_is_no_dispatcher() -> None:
    with serving("127.0.0.1:0") as address:
        result = run_here("status", address)
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert f"the server at {address} is no dispatcher" in result.err
    assert_one_line(result.err)


def test_foreign_port_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = run_here("status", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "1")
    assert result.code == ExitCode.UNAVAILABLE
    assert_one_line(result.err)


def test_module_equals_installed_command() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "zmqdist", "--version"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.stdout == run("--version").out


def test_package_runs_as_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "zmqdist", "--version"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, run("--version").out)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--resource", "gpu"), "'gpu' is no resource: write NAME=N, as gpu=2"),
        (("--resource", "x=auto"), "'x=auto' is no resource"),
        (("--resource", "gpu=0.5"), "resources: gpu is 0.5, wants whole devices"),
        (("--resource", "gpu=1", "--threads"), "gpu needs slots that are processes"),
        (("--memory-max", "1", "--threads"), "memory_max_gb is 1.0, wants more than 0 GB, and"),
        (("--nested-slots-max", "5000"), "5000 is not in the range 0<=x<=4096"),
    ],
)
def test_bad_resources_of_worker_are_named(options: tuple[str, ...], text: str) -> None:
    result = run_here("worker", "--dispatcher", "localhost:1", *options)
    assert result.code != ExitCode.OK
    assert text in result.err
    assert result.out == ""
