"""Which tests run where: each folder says what its tests need, and each tier runs what needs no
more than that.

    pure    no socket, no process: machines, wire formats, datasets, cluster files, the simulated cluster with few seeds
    test    pure, and all clusters of threads in one process; of each capability one test with real processes and one with a kill -9
    all     the rest, too: what stands in a folder called `full`, and the simulation with many seeds

What stands in a folder called `campaigns` or `engines` is in no tier: it needs hosts, root's
rights, programs of the system or much time. `make campaign` and `make test-engines` run it.

`make test` runs the tier `test`, `make test-all` the tier `all`, and the tier `pure` on other
Pythons. A file that is named on the command line runs whatever its tier is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

TIERS: Final = ("pure", "test", "all")

PURE: Final = (
    "tests/cluster",
    "tests/coordination/test_barriers_machine.py",
    "tests/coordination/test_keys_machine.py",
    "tests/coordination/test_machine.py",
    "tests/coordination/test_machine_at_random.py",
    "tests/coordination/test_primitives_client_machine.py",
    "tests/coordination/test_primitives_machine.py",
    "tests/data",
    "tests/data/service/dispatcher/machine/test_figures.py",
    "tests/data/service/dispatcher/machine/test_machine.py",
    "tests/data/service/dispatcher/machine/test_portions.py",
    "tests/data/service/dispatcher/machine/test_records.py",
    "tests/data/service/dispatcher/machine/test_rounds.py",
    "tests/data/service/dispatcher/machine/test_runs.py",
    "tests/data/service/dispatcher/machine/test_tables.py",
    "tests/data/service/dispatcher/machine/test_worker_list.py",
    "tests/data/service/reader/test_deliveries.py",
    "tests/data/service/snapshots/test_machine.py",
    "tests/data/service/worker/test_tasks_machine.py",
    "tests/house/test_public_names.py",
    "tests/launch/test_elasticity_machine.py",
    "tests/rpc/test_admission_machine.py",
    "tests/rpc/test_batching_machine.py",
    "tests/scheduling/coordinator/test_machine.py",
    "tests/scheduling/coordinator/test_work.py",
    "tests/scheduling/dispatcher/test_credit.py",
    "tests/scheduling/dispatcher/test_machine.py",
    "tests/scheduling/dispatcher/test_membership_and_leases.py",
    "tests/scheduling/dispatcher/test_resources.py",
    "tests/scheduling/dispatcher/test_large_batches.py",
    "tests/scheduling/test_message_counts.py",
    "tests/scheduling/shared/test_quantities.py",
    "tests/scheduling/worker/test_machine.py",
    "tests/sim",
    "tests/tasks/test_agreement_machine.py",
    "tests/tasks/test_collectives_machine.py",
    "tests/tasks/test_mailbox_machine.py",
    "tests/test_batches.py",
    "tests/test_errors.py",
    "tests/test_messages.py",
    "tests/test_nest.py",
    "tests/test_optimizers.py",
    "tests/test_specs.py",
    "tests/transport/test_bulk_machine.py",
    "tests/transport/test_calls_machine.py",
    "tests/transport/test_calls_machine_window.py",
    "tests/transport/test_keyring_machine.py",
    "tests/transport/test_pace.py",
    "tests/variables/test_updates_machine.py",
    "tests/wire",
)
"""Files, and folders with all that stands in them but `full` and what is of PROCESSES."""
PROCESSES: Final = "tests/data/service/"
"""A folder in a pure folder whose tests start processes, except the files that PURE names."""

FULL: Final = "full"
OUTSIDE: Final = frozenset({"campaigns", "engines"})

CAPABILITIES: Final = (
    "checkpoint and recovery",
    "cluster servers",
    "collectives",
    "command",
    "coordination",
    "data service",
    "digits example",
    "dispatcher",
    "distributed snapshot",
    "exactly once",
    "executor",
    "hosts",
    "joining",
    "journal",
    "launch",
    "local cluster",
    "messages",
    "parameter servers",
    "per-worker values",
    "rpc",
    "scheduling",
    "shared memory",
    "shared primitives",
    "test harness",
    "variables",
)
"""What users rely on across processes: the tier `test` shows each with real processes and with a
kill -9 (tests/house/test_tiers.py)."""


def runs_in(path: Path, root: Path, tier: str) -> bool:
    """Whether a test file, or a folder that may hold some, is part of a tier."""
    name = path.relative_to(root).as_posix()
    if OUTSIDE & set(name.split("/")):
        return False
    if tier == "all":
        return True
    if FULL in name.split("/"):
        return False
    if tier == "test":
        return True
    if name in PURE:
        return True
    if f"{name}/".startswith(PROCESSES) and path.suffix == ".py":
        return False
    return any(
        f"{name}/".startswith(f"{pure}/") or f"{pure}/".startswith(f"{name}/") for pure in PURE
    )


def rank(path: Path, root: Path) -> int:
    """When a file runs: what waits longest begins first, and the pure tests fill the time that
    others wait."""
    if FULL in path.relative_to(root).parts:
        return 0
    return 2 if runs_in(path, root, "pure") else 1
