"""`python -m benchmarks [NAME ...] [--quick] [--json]`: all questions, or those of these names.

calls      blocking and pipelined RPC calls, against a bare pyzmq echo
tasks      no-op tasks per second with two worker processes, against a ProcessPoolExecutor of two
roundtrip  one task at a time, against a bare pyzmq round trip
results    large results by size, against one frame of a bare pyzmq socket
startup    from the start of Python to the first result on two worker processes
imports    what `import zmqdist` costs beyond NumPy
memory     a million queued no-op tasks: the dispatcher's memory at its peak and afterwards
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks import imports, memory, startup
from zmqdist.launch.local_cluster import local_cluster
from zmqdist.observe import bench
from zmqdist.observe.bench import Figure, Plan
from zmqdist.observe.peer import peer_process


def calls(plan: Plan) -> list[Figure]:
    with peer_process() as peer:
        return bench.measure_calls(peer, plan)


def tasks(plan: Plan) -> list[Figure]:
    with local_cluster(workers=2) as cluster:
        return bench.measure_tasks(cluster, plan)


def roundtrip(plan: Plan) -> list[Figure]:
    with peer_process() as peer, local_cluster(workers=2) as cluster:
        return bench.measure_round_trip(cluster, peer, plan)


def results(plan: Plan) -> list[Figure]:
    with peer_process() as peer, local_cluster(workers=2) as cluster:
        return bench.measure_results(cluster, peer, plan)


QUESTIONS: dict[str, Callable[[Plan], list[Figure]]] = {
    "calls": calls,
    "tasks": tasks,
    "roundtrip": roundtrip,
    "results": results,
    "startup": startup.measure,
    "imports": imports.measure,
    "memory": memory.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="questions; none: all of them")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller blocks")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in QUESTIONS]
    if unknown:
        parser.error(f"no question {unknown[0]!r}; there are: {', '.join(QUESTIONS)}")
    plan = bench.QUICK if given.quick else bench.FULL
    figures: list[Figure] = []
    for name in given.names or QUESTIONS:
        if sys.stderr.isatty():
            print(f"measuring {name} ...", file=sys.stderr)
        figures += QUESTIONS[name](plan)
    print(bench.as_json(figures) if given.json else "\n".join(bench.table(figures).lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
