"""Clusters on hosts that ssh reaches: each host is a namespace with an sshd of its own
(ssh_hosts.py)."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.campaigns.hosts import Host
from tests.engines.ssh_hosts import SshNetwork, left_on
from tests.helpers import trained_accuracy
from tests.launch.conformance import CHECKS
from tests.launch.helpers import BUSY, FILE, Launched, eventually, read
from zmqdist._version import __version__

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("a", "b", "c")
CORES = len(os.sched_getaffinity(0))
DEAD_SOON = ["-o", "ServerAliveInterval=1"]
"""Three seconds of silence end a connection."""
EPOCH = re.compile(r"epoch ( \d|\d\d)/30  loss \d\.\d{4}  accuracy 0\.\d{3}")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNetwork]:
    """Hosts that no test here cuts, kills or changes."""
    with SshNetwork(tmp_path_factory.mktemp("ssh"), *HOSTS) as network:
        yield network


@pytest.fixture
def net(tmp_path: Path) -> Iterator[SshNetwork]:
    (tmp_path / "ssh").mkdir()
    with SshNetwork(tmp_path / "ssh", *HOSTS) as network:
        yield network


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """launch(network, ...): a launcher on the host "head"."""
    made: list[Launched] = []

    def make(network: SshNetwork, *args: object, **options: object) -> Launched:
        made.append(Launched(tmp_path / "run", *args, start=network.head.run, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.kill()


Launcher = Callable[..., Launched]


def file_on_hosts(
    network: SshNetwork,
    file: str,
    hosts: str = "a, b, c",
    options: list[str] | None = None,
    more: str = "",
) -> str:
    """The text of a file, with these hosts."""
    words = [*network.options, *(options or [])]
    return f"{file}launcher: ssh\nssh:\n  hosts: [{hosts}]\n  options: {words}\n{more}"


def digits(network: SshNetwork, options: list[str] | None = None) -> str:
    """configs/digits.yaml on these hosts, with the program's path as seen from anywhere."""
    text = (ROOT / "configs" / "digits.yaml").read_text()
    return file_on_hosts(
        network,
        text.replace("examples/digits.py", str(ROOT / "examples" / "digits.py")),
        options=options,
    )


def check_clean(
    network: SshNetwork, within_s: float = 20.0, hosts: tuple[str, ...] = HOSTS
) -> None:
    for name in hosts:
        found: list[str] = []

        def looked(host: Host = network[name], found: list[str] = found) -> bool:
            found[:] = left_on(host)
            return not found

        try:
            eventually(looked, f"nothing is left on {name}", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from None


def trained(job: Launched, within_s: float = 200.0) -> None:
    assert job.ends(within_s) == 0, job.text
    assert sum(bool(EPOCH.fullmatch(line)) for line in job.lines) == 30, job.text
    assert trained_accuracy(job.text) >= 0.95


# -- the main job ----------------------------------------------------------------------------------


def test_digits_on_three_hosts(shared: SshNetwork, launch: Launcher) -> None:
    job = launch(shared, file=digits(shared))
    trained(job)
    job.left_nothing()
    check_clean(shared)


def test_digits_with_host_cut_off_for_20_s(net: SshNetwork, launch: Launcher) -> None:
    # the weights of ps:0 take 35 s, so the job takes longer than the cut
    net["c"].shape(rate_mbit=1)
    job = launch(net, file=digits(net))
    job.saw("epoch  2/30", 60)
    net["b"].cut()
    mending = threading.Timer(20.0, net["b"].mend)
    mending.start()
    trained(job)
    assert not mending.is_alive(), "the host was back while the job ran"
    mending.join()
    assert "] is lost" not in job.text, "its connection has outlived the cut"
    job.left_nothing()
    check_clean(net)


def test_digits_with_killed_host(net: SshNetwork, launch: Launcher) -> None:
    net["c"].shape(rate_mbit=2)  # the job takes longer than the loss is noticed
    job = launch(net, file=digits(net, DEAD_SOON))
    job.saw("epoch  2/30", 60)
    net["b"].cut()  # a host that loses its power says nothing, and the kernel of this one would
    net["b"].close()
    job.saw("[b] is lost: its connection was silent for too long: ", 60)
    job.saw("[worker-1@b] ended (killed by SIGKILL); it is started again (1 of 3)")
    trained(job)
    job.left_nothing()
    check_clean(net, hosts=("a", "c"))


def test_page_runs_as_written(tmp_path: Path, launch: Launcher) -> None:
    """Each command that is printed for the laptop, on hosts that do not share its folder, writes
    what is printed below it."""
    page = (ROOT / "docs" / "launch_ssh.md").read_text()
    program, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (file,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = dict(
        re.findall(
            r"^```text\nme@laptop\$ zmqdist (.*?)\n(.*?)^```", page, re.MULTILINE | re.DOTALL
        )
    )
    work = tmp_path / "where"
    for folder in (tmp_path / "ssh", work):
        folder.mkdir()
    with SshNetwork(tmp_path / "ssh", "node-a", "node-b") as network:
        (work / "where.py").write_text(f"{program}\n\nmain()\n")
        (work / "where.yaml").write_text(f"{file}  options: {network.options}\n")
        for name in ("node-a", "node-b"):
            network[name].tool("mount", "-t", "tmpfs", "tmpfs", str(work))
        looked = text_of(network, work, "doctor where.yaml").splitlines()
        *code, counted = text_of(network, work, "launch where.yaml").splitlines()
    report = [line for line in looked if "node-" in line or "worker: " in line]
    assert strip_numbers(report) == strip_numbers(shown["doctor where.yaml"].splitlines()[1:])
    *code_shown, counted_shown = shown["launch where.yaml"].splitlines()
    assert strip_numbers(sorted(code)) == strip_numbers(code_shown)
    counts = ast.literal_eval(counted)
    assert sorted(counts) == sorted(ast.literal_eval(counted_shown)) == ["node-a", "node-b"]
    assert sum(counts.values()) == 200


def text_of(network: SshNetwork, folder: Path, words: str) -> str:
    """Run `zmqdist` with these words on the head, and return its output."""
    command = [sys.executable, "-m", "zmqdist_cli", *words.split()]
    process = network.head.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    return str(text)


def strip_numbers(lines: list[str]) -> list[str]:
    """Return lines in which all numbers are 9 and paths have their last part only."""
    return [re.sub(r"/\S+/(\w+)", r"/\1", re.sub(r"\d+", "9", line)) for line in lines]


# -- launchers -------------------------------------------------------------------------------------


def conformance(network: SshNetwork, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    file = folder / "conformance.yaml"
    file.write_text(file_on_hosts(network, "name: c\nprogram: x\njobs: {worker: {count: 4}}\n"))
    return network.head.run(
        [sys.executable, "-m", "tests.launch.conformance", str(file), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_launcher_keeps_promises(shared: SshNetwork, tmp_path: Path) -> None:
    process = conformance(shared, tmp_path)
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    assert text.count("passed r") == len(CHECKS), text
    check_clean(shared)


def test_roles_end_with_killed_launcher(shared: SshNetwork, tmp_path: Path) -> None:
    process = conformance(shared, tmp_path, "KILLED")
    assert process.stdout is not None
    assert next(line for line in process.stdout if line.startswith("pids "))
    assert left_on(shared["a"])
    process.kill()
    process.wait(20)
    check_clean(shared)


@pytest.mark.parametrize("how", ["normal end", "Ctrl-C", "kill -9", "SIGTERM"])
def test_hosts_are_left_clean(shared: SshNetwork, launch: Launcher, how: str) -> None:
    program = "from zmqdist.coordinator import ClusterCoordinator as C\nwith C() as c: print(c.schedule(sum, ([1, 2],)).get())"
    file = file_on_hosts(shared, FILE.replace("{count: 2}", "{count: 3}\n  ps: {count: 3}"))
    job = launch(shared, program if how == "normal end" else BUSY, file=file)
    job.saw("3" if how == "normal end" else "a function runs", 60)
    if how == "Ctrl-C":
        job.interrupt()
    elif how != "normal end":
        job.process.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGTERM)
    code = {"normal end": 0, "Ctrl-C": 130, "kill -9": -9, "SIGTERM": 143}[how]
    assert job.ends(60) == code, job.text
    job.left_nothing(folders=how != "kill -9")
    check_clean(shared)


def test_cut_off_host_cleans_up_by_itself(net: SshNetwork, launch: Launcher) -> None:
    file = FILE.replace("{count: 2}", "{count: 3, orphan_limit_s: 5}\n  ps: {count: 3}")
    job = launch(net, BUSY, file=file_on_hosts(net, file), grace_s=2.0)
    job.saw("a function runs", 60)
    net["b"].cut()
    job.interrupt()
    assert job.ends(60) == 128 + signal.SIGINT, job.text
    check_clean(net, hosts=("a", "c"))
    check_clean(net, within_s=5.0 + 10.0)


ARRAYS = """
    import numpy as np
    from zmqdist.coordinator import ClusterCoordinator

    def total(array):
        return np.stack([array, array]), float(array.sum())

    with ClusterCoordinator() as coordinator:
        array = np.ones(1 << 20)
        values = [coordinator.schedule(total, (array,)) for _ in range(12)]
        results = coordinator.fetch(values)
        assert all(result[1] == 1 << 20 for result in results)
        print("all there", flush=True)
        import time
        while True:
            time.sleep(0.1)
"""


def test_memory_is_not_shared_by_hosts(shared: SshNetwork, launch: Launcher) -> None:
    job = launch(
        shared, ARRAYS, file=file_on_hosts(shared, FILE.replace("{count: 2}", "{count: 6}"))
    )
    job.saw("all there", 100)
    mapped = {name: shared_memory(shared[name]) for name in ("head", *HOSTS)}
    job.interrupt()
    job.ends(60)
    assert sum(map(bool, mapped.values())) >= 2, f"the arrays were in shared memory: {mapped}"
    names = sorted(mapped)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            assert not mapped[one] & mapped[other], f"{one} and {other} share memory"


def shared_memory(host: Host) -> set[str]:
    """The inodes of memory files of zmqdist that processes of a host have mapped."""
    lines = [
        line
        for pid in host.processes()
        for line in read(Path("/proc", str(pid), "maps")).splitlines()
    ]
    return {line.split()[4] for line in lines if "memfd:zmqdist-arena" in line}


# -- what is wrong with a host ---------------------------------------------------------------------


def fake_python(folder: Path, name: str, code: str) -> str:
    """A Python of a host that runs this before anything else."""
    path = folder / name
    path.write_text(
        f'#!{sys.executable}\nimport sys\n{code}\nsys.argv[:] = ["-c", '
        f"*sys.argv[3:]]\nexec(_code)\n"
    )
    path.write_text(
        path.read_text().replace("import sys\n", "import sys\n_code = sys.argv[2]\n", 1)
    )
    path.chmod(0o755)
    return str(path)


def refused(
    network: SshNetwork,
    launch: Launcher,
    hosts: str = "a",
    options: list[str] | None = None,
    python: str = "",
) -> str:
    """The one line that a launch ends with."""
    more = f"  python: {python}\n" if python else ""
    words = network.options if options is None else options
    file = f"{FILE}launcher: ssh\nssh:\n  hosts: [{hosts}]\n  options: {words}\n{more}"
    job = launch(network, "print('it runs')", file=file, run=COMMAND)
    assert job.ends(60) in (2, 3), job.text
    (line,) = job.lines
    job.left_nothing()
    return line


COMMAND = """
import sys
from zmqdist_cli.main import main
sys.exit(main(["launch", sys.argv[1], "--grace", sys.argv[2]]))
"""


def test_unknown_host(shared: SshNetwork, launch: Launcher) -> None:
    line = refused(shared, launch, "nowhere-at-all")
    assert line.startswith(
        "zmqdist launch: nowhere-at-all: its name is not known: check the name, or add `Host "
        "nowhere-at-all`"
    )


def test_host_that_refuses_key(shared: SshNetwork, launch: Launcher) -> None:
    shared.make_key("other_key")
    options = [
        *shared.options,
        "-i",
        str(shared.folder / "other_key"),
        "-o",
        f"IdentityFile={shared.folder / 'other_key'}",
    ]
    text = (shared.folder / "ssh_config").read_text().replace("user_key", "other_key")
    (shared.folder / "ssh_config_other").write_text(text)
    options = ["-F", str(shared.folder / "ssh_config_other")]
    line = refused(shared, launch, options=options)
    assert line == (
        "zmqdist launch: a: it refused your key: run `ssh-copy-id a`, or load the right key with "
        "`ssh-add` "
        "(Permission denied (publickey))"
    )


@pytest.mark.parametrize("what", ["not known", "changed"])
def test_host_with_unexpected_key(shared: SshNetwork, launch: Launcher, what: str) -> None:
    known = shared.folder / f"known_hosts_{what.replace(' ', '_')}"
    known.write_text("")
    if what == "changed":
        shared.make_key("former_host_key")
        kind, text, *_ = (shared.folder / "former_host_key.pub").read_text().split()
        known.write_text(f"a {kind} {text}\n")
    line = refused(shared, launch, options=["-o", f"UserKnownHostsFile={known}", *shared.options])
    assert line.startswith(
        f"zmqdist launch: a: its host key "
        f"{'has changed' if what == 'changed' else 'is not known'}: "
    ), line
    assert ("ssh-keygen -R a" in line) == (what == "changed")


def test_host_without_sshd(shared: SshNetwork, launch: Launcher) -> None:
    line = refused(shared, launch, "head")
    assert (
        line
        == "zmqdist launch: head: no sshd answers there: start sshd, or name its port: options: "
        "[-p, PORT]"
    )


def test_host_without_answer(net: SshNetwork, launch: Launcher) -> None:
    net["b"].cut()
    line = refused(net, launch, "a, b", options=["-o", "ConnectTimeout=2", *net.options])
    assert line.startswith(
        "zmqdist launch: b: it cannot be reached: is it up, and does `ssh b` work from here?"
    ), line
    check_clean(net)


def test_host_without_python(shared: SshNetwork, launch: Launcher) -> None:
    line = refused(shared, launch, python="/opt/nowhere/python")
    assert line == (
        "zmqdist launch: a: there is no /opt/nowhere/python there: name the Python of that host "
        "as `ssh.python` in the file"
    )


def test_host_with_other_python(shared: SshNetwork, launch: Launcher, tmp_path: Path) -> None:
    python = fake_python(
        tmp_path, "python", "sys.version = sys.version.replace(sys.version.split()[0], '3.9.2')"
    )
    here = sys.version.split()[0]
    line = refused(shared, launch, python=python)
    assert line.startswith(
        f"zmqdist launch: a: Python 3.9.2 there and {here} here cannot exchange functions: name a "
        f"Python "
    ), line


def test_host_without_zmqdist(shared: SshNetwork, launch: Launcher) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if (
        python is None
        or subprocess.run([python, "-c", "import zmqdist"], capture_output=True, cwd="/").returncode
        == 0
    ):
        pytest.skip("this machine has no Python without zmqdist")
    line = refused(shared, launch, python=python)
    assert line == (
        f"zmqdist launch: a: {python}: No module named 'zmqdist': install zmqdist {__version__} "
        f"there, or name the Python "
        "that has it as `python`"
    )


def test_host_with_other_zmqdist(shared: SshNetwork, launch: Launcher, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(
        ROOT / "zmqdist", other / "zmqdist", ignore=shutil.ignore_patterns("__pycache__")
    )
    (other / "zmqdist" / "_version.py").write_text('__version__ = "99.1"\n')
    python = fake_python(tmp_path, "python", f"sys.path.insert(0, {str(other)!r})")
    line = refused(shared, launch, python=python)
    assert line == (
        f"zmqdist launch: a: zmqdist 99.1 there ({other / 'zmqdist'}) and {__version__} here "
        f"({ROOT / 'zmqdist'}): install "
        "the same version on both"
    )


def test_host_without_writable_folder(net: SshNetwork, launch: Launcher) -> None:
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/root"):
        net["a"].tool("mount", "--bind", folder, folder)
        net["a"].tool("mount", "-o", "remount,bind,ro", folder)
    line = refused(net, launch)
    assert "neither /dev/shm nor a temporary folder can be written" in line
    assert line.endswith("make one writable, or set TMPDIR there"), line


def test_host_with_wrong_clock_is_warning(
    shared: SshNetwork, launch: Launcher, tmp_path: Path
) -> None:
    python = fake_python(
        tmp_path,
        "python",
        "import time; now = time.clock_gettime\n"
        "time.clock_gettime = lambda clock: now(clock) + 601 * (clock == time.CLOCK_REALTIME)",
    )
    job = launch(
        shared,
        "print('it runs')",
        file=file_on_hosts(shared, FILE, "a", more=f"  python: {python}\n"),
    )
    assert job.ends(60) == 0, job.text
    assert any(
        line.startswith("[a] warning: its clock is 10.0 minutes ahead of this host's")
        for line in job.lines
    ), job.text
    assert "it runs" in job.lines


def test_doctor_looks_at_each_host(shared: SshNetwork, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(file_on_hosts(shared, FILE, "a, {host: b, slots: 2}, nowhere-at-all"))
    command = [sys.executable, "-m", "zmqdist_cli", "doctor", str(file)]
    text, _ = shared.head.run(command, stdout=subprocess.PIPE, text=True).communicate(timeout=60)
    here = f"Python {sys.version.split()[0]}, zmqdist {__version__} ({ROOT / 'zmqdist'}), {CORES} cores"
    assert f"ok       a: {here}\n" in text, text
    assert f"ok       b: {here}, 2 slots\n" in text, text
    assert "problem  nowhere-at-all: its name is not known: check the name" in text, text
