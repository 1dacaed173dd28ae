"""Rounds of ends of a cluster on three hosts by ssh: after each, nothing may be left on any host.

    python -m tests.engines.rounds [ROUNDS]      50 unless said otherwise; each has every kind of end once

Kinds: the program ends, Ctrl-C, kill -9 of the launcher, and a link that is cut while the cluster ends (there the cut host has
`orphan_limit_s` + 10 s). The exit code is 1 where something was left.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.engines.ssh_hosts import SshNetwork, left_on
from tests.launch.launched import BUSY, FILE, Launched, eventually

HOSTS = ("a", "b", "c")
ORPHAN_LIMIT_S = 5.0
KINDS = ("the program ends", "Ctrl-C", "kill -9", "a cut link")
ENDS = "from zmqdist.coordinator import ClusterCoordinator as C\nwith C() as c: print(c.schedule(sum, ([1, 2],)).get())"


def play(net: SshNetwork, folder: Path, kind: str) -> float:
    """Run a cluster to such an end; return the seconds until nothing was left. Raises AssertionError."""
    jobs = FILE.replace("{count: 2}", f"{{count: 3, orphan_limit_s: {ORPHAN_LIMIT_S:g}}}\n  ps: {{count: 3}}")
    file = f"{jobs}launcher: ssh\nssh: {{hosts: [{', '.join(HOSTS)}], options: {net.options}}}\n"
    job = Launched(folder, ENDS if kind == KINDS[0] else BUSY, file=file, grace_s=2.0, start=net.head.run)
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
        limit_s = ORPHAN_LIMIT_S + 10.0 if kind == "a cut link" else 10.0
        for name in HOSTS:
            eventually(lambda name=name: not left_on(net[name]), f"nothing is left on {name}", limit_s)  # type: ignore[misc]
        net["b"].mend()
        return time.monotonic() - begun


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    longest = dict.fromkeys(KINDS, 0.0)
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ssh").mkdir()
        with SshNetwork(folder / "ssh", *HOSTS) as net:
            for number in range(rounds):
                for kind in KINDS:
                    try:
                        took_s = play(net, folder / f"{number}-{KINDS.index(kind)}", kind)
                    except AssertionError as error:
                        failed.append(f"round {number}, {kind}: {error}")
                        print(failed[-1], flush=True)
                    else:
                        longest[kind] = max(longest[kind], took_s)
                print(f"round {number}: {len(failed)} failures so far", flush=True)
    for kind, took_s in longest.items():
        print(f"{kind:18} nothing left after at most {took_s:5.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
