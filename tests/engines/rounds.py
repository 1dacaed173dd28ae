"""Rounds of ends of a cluster on three hosts by ssh, or on two nodes of Slurm: after each, nothing
may be left on any host.

    python -m tests.engines.rounds [ROUNDS] [slurm]      50 unless said otherwise; each has every kind of end once

Kinds: the program ends, Ctrl-C, kill -9 of the launcher, and a link that is cut while the cluster
ends (there the cut host has `orphan_limit_s` + 10 s); under Slurm the program ends, and scancel.
The exit code is 1 where something was left.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.ssh_hosts import SshNetwork, left_on
from tests.launch.helpers import BUSY, FILE, Launched, eventually

HOSTS = ("a", "b", "c")
NODES = ("n1", "n2")
ORPHAN_LIMIT_S = 5.0
LEFT_S = 10.0
KINDS = ("the program ends", "Ctrl-C", "kill -9", "a cut link")
KINDS_OF_SLURM = ("the program ends", "scancel")
ENDS = "from zmqdist.coordinator import ClusterCoordinator as C\nwith C() as c: print(c.schedule(sum, ([1, 2],)).get())"


def play(net: SshNetwork, folder: Path, kind: str) -> float:
    """Run a cluster to such an end; return the seconds until nothing was left. Raises
    AssertionError."""
    jobs = FILE.replace(
        "{count: 2}", f"{{count: 3, orphan_limit_s: {ORPHAN_LIMIT_S:g}}}\n  ps: {{count: 3}}"
    )
    file = f"{jobs}launcher: ssh\nssh: {{hosts: [{', '.join(HOSTS)}], options: {net.options}}}\n"
    job = Launched(
        folder, ENDS if kind == KINDS[0] else BUSY, file=file, grace_s=2.0, start=net.head.run
    )
    with contextlib.ExitStack() as closing:
        closing.callback(job.kill)
        job.saw("3" if kind == KINDS[0] else "a function runs", 100)
        if kind == "kill -9":
            job.process.send_signal(signal.SIGKILL)
        elif kind != KINDS[0]:
            if kind == "a cut link":
                net["b"].cut()
            job.interrupt()
        job.ends(100)
        begun = time.monotonic()
        limit_s = LEFT_S + (ORPHAN_LIMIT_S if kind == "a cut link" else 0.0)
        for name in HOSTS:
            eventually(
                lambda name=name: not left_on(net[name]), f"nothing is left on {name}", limit_s
            )  # type: ignore[misc]
        net["b"].mend()
        return time.monotonic() - begun


def play_in_slurm(slurm: SlurmCluster, folder: Path, kind: str) -> float:
    """As `play`, for a job of Slurm."""
    (folder / "temporary").mkdir(parents=True)
    (folder / "program.py").write_text(textwrap.dedent(ENDS if kind == KINDS_OF_SLURM[0] else BUSY))
    file = "name: test\nlauncher: slurm\nslurm: {nodes: 2}\njobs: {worker: {count: 2}, ps: {count: 1}}\n"
    (folder / "cluster.yaml").write_text(f"{file}program: python program.py\n")
    process = slurm.start(
        [sys.executable, "-m", "zmqdist_cli", "launch", "cluster.yaml"],
        cwd=folder,
        environment={"TMPDIR": str(folder / "temporary")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text = ""
        for line in process.stdout:
            text += line
            if "a function runs" in line and len(slurm.jobs()) == 1:
                slurm.run("scancel", *slurm.jobs())
        code = process.wait(100)
        assert code == (0 if kind == KINDS_OF_SLURM[0] else 143), f"exit code {code}: {text}"
        begun = time.monotonic()
        for name in ("login", *NODES):
            eventually(
                lambda name=name: not slurm.left_on(name), f"nothing is left on {name}", LEFT_S
            )  # type: ignore[misc]
        left = list((folder / "temporary").iterdir())
        assert not left, left
        return time.monotonic() - begun
    finally:
        process.kill()


def run_rounds(rounds: int, kinds: Sequence[str], play_one: Callable[[int, str], float]) -> int:
    """Play each kind of end so many times, and print what was left; return how many times something
    was."""
    longest = dict.fromkeys(kinds, 0.0)
    failures = 0
    for number in range(rounds):
        for kind in kinds:
            try:
                longest[kind] = max(longest[kind], play_one(number, kind))
            except AssertionError as error:
                failures += 1
                print(f"round {number}, {kind}: {error}", flush=True)
        print(f"round {number}: {failures} failures so far", flush=True)
    for kind, took_s in longest.items():
        print(f"{kind:18} nothing left after at most {took_s:5.1f} s")
    return failures


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as closing:
        folder = Path(name)
        if sys.argv[2:] == ["slurm"]:
            slurm = closing.enter_context(SlurmCluster(*NODES))
            failures = run_rounds(
                rounds,
                KINDS_OF_SLURM,
                lambda number, kind: play_in_slurm(
                    slurm, folder / f"{number}-{KINDS_OF_SLURM.index(kind)}", kind
                ),
            )
        else:
            (folder / "ssh").mkdir()
            net = closing.enter_context(SshNetwork(folder / "ssh", *HOSTS))
            failures = run_rounds(
                rounds,
                KINDS,
                lambda number, kind: play(net, folder / f"{number}-{KINDS.index(kind)}", kind),
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
