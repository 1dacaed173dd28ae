"""How much memory is left, on the host or in the control group; and the error if it is not
enough.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqdist import errors
from zmqdist.transport import memory_limits
from zmqdist.transport.memory_limits import (
    available_bytes,
    check_room,
    memory_exhausted,
    oom_kills,
    usable_bytes,
)

MIB = 2**20
MEMINFO = "MemTotal:       1000000 kB\nMemFree:          10 kB\nMemAvailable:     2048 kB\n"
STAT = "anon 5\ninactive_file 1000\n"
OLD_STAT = "cache 5\ntotal_inactive_file 2000\n"


def machine(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Make a /proc and a /sys/fs/cgroup with these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc", folder / "groups"


V2 = {"proc/self/cgroup": "0::/job.slice/step\n", "proc/meminfo": MEMINFO}
V1 = {"proc/self/cgroup": "5:cpu:/x\n4:memory:/job/step\n", "proc/meminfo": MEMINFO}

MACHINES: dict[str, tuple[dict[str, str], int | None, int | None]] = {
    "it tells nothing": ({}, None, None),
    "without a limit": (V2 | {"groups/job.slice/memory.max": "max\n"}, None, 2048 * 1024),
    "a limit of the own group": (
        V2
        | {
            "groups/job.slice/step/memory.max": "100000\n",
            "groups/job.slice/step/memory.current": "40000\n",
            "groups/job.slice/step/memory.stat": STAT,
        },
        100_000,
        61_000,
    ),
    "a limit further up, as a batch system sets it": (
        V2
        | {"groups/job.slice/memory.max": "50000\n", "groups/job.slice/memory.current": "40000\n"},
        50_000,
        10_000,
    ),
    "a container, which sees itself as the top": (
        {
            "proc/self/cgroup": "0::/\n",
            "groups/memory.max": "70000\n",
            "groups/memory.current": "80000\n",
        },
        70_000,
        0,
    ),
    "the first version of control groups": (
        V1
        | {
            "groups/memory/job/memory.limit_in_bytes": "100000\n",
            "groups/memory/job/memory.usage_in_bytes": "90000\n",
            "groups/memory/job/memory.stat": OLD_STAT,
        },
        100_000,
        12_000,
    ),
    "a group outside of what is mounted": (
        {"proc/self/cgroup": "0::/../../other\n", "proc/meminfo": MEMINFO},
        None,
        2**21,
    ),
    "nonsense": (
        {"proc/self/cgroup": "nonsense\n", "proc/meminfo": "MemAvailable:\nx\n"},
        None,
        None,
    ),
}


@pytest.mark.parametrize(("files", "usable", "available"), MACHINES.values(), ids=MACHINES.keys())
def test_smallest_memory_limit_counts(
    tmp_path: Path, files: dict[str, str], usable: int | None, available: int | None
) -> None:
    proc, groups = machine(tmp_path, files)
    here = usable_bytes(tmp_path / "nothing", tmp_path / "nothing")
    assert usable_bytes(proc, groups) == (here if usable is None else usable)
    assert available_bytes(proc, groups) == available


def test_host_reports_its_memory() -> None:
    available = available_bytes()
    assert available is not None
    assert 0 < available < usable_bytes()


@pytest.mark.parametrize(("text", "count"), [("nr_free 1\noom_kill 3\n", 3), ("nr_free 1\n", 0)])
def test_kernel_kills_are_counted(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "vmstat").write_text(text)
    assert oom_kills(tmp_path) == count


def test_memory_error_names_sizes_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 100 * MIB)
    check_room(100 * MIB, "a copy")
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        check_room(200 * MIB, "a copy")
    text = caught.value.message
    assert text.startswith("no memory for a copy: 200 MiB (100 MiB are available to this process).")
    assert all(
        word in text for word in ("queue_bytes_max", "ulimit -v", "ZMQDIST_ARENA", "control group")
    )


def test_small_sizes_are_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 0)
    check_room(memory_limits.CHECKED_BYTES_MIN - 1, "a copy")
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: None)
    check_room(2**60, "a copy")
    assert "available" not in memory_exhausted(MIB, "a copy").message
