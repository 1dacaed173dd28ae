"""The backend of joblib: its own tests of backends, and what it does on a cluster.

Needs the packages joblib and threadpoolctl: pip install zmqdist[engines].
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd

joblib = pytest.importorskip("joblib", reason="needs pip install zmqdist[engines]")
from zmqdist.integrations import joblib as backends  # noqa: E402
from zmqdist.integrations.joblib import ZmqdistBackend  # noqa: E402  # registers itself

# joblib refers to a backend in a cycle, so that its coordinator outlives a test
pytestmark = pytest.mark.shares_cluster

PLUGIN = """
import joblib.parallel
import zmqdist as zd
from zmqdist.integrations.joblib import ZmqdistBackend

cluster = zd.local_cluster(workers=2)


class Backend(ZmqdistBackend):
    def __init__(self, target=None, **options):
        super().__init__(cluster if target is None else target, **options)


joblib.parallel.BACKENDS["zmqdist"] = Backend
"""

NOT_OF_OURS = {
    "test_nested_loop": "a process of loky has not registered the backend",
    "test_parallel_with_interactively_defined_functions": "nor has a new process",
    "test_parallel_with_unpicklable_functions_in_args": "nor has a new process",
    "test_error_capture": "a KeyboardInterrupt of a function is an UnknownError",
    "test_nested_backend_in_sequential": "without n_jobs all slots are used",
    "test_auto_memmap_on_arrays_from_generator": "arrays come by shared memory, not by files",
    "test_memmapping_leaks": "arrays come by shared memory, not by files",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2) as cluster, joblib.parallel_config("zmqdist", target=cluster):
        yield cluster


@pytest.mark.timeout(600)
def test_backend_passes_tests_of_joblib(tmp_path: Path) -> None:
    tests = (Path(joblib.__file__).parent / "test/test_parallel.py").read_text()
    tests = re.sub(r'PROCESS_BACKENDS = \[".*"\]', 'PROCESS_BACKENDS = ["zmqdist"]', tests)
    (tmp_path / "test_zmqdist.py").write_text(tests)
    (tmp_path / "zmqdist_backend.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    thread_unsafe\n    timeout\n")
    selected = " and ".join(["zmqdist", *(f"not {name}" for name in NOT_OF_OURS)])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "zmqdist_backend", "-q", "-k", selected, "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) >= 90


def square_all(count: int) -> list[int]:
    values: list[int] = joblib.Parallel(n_jobs=2)(joblib.delayed(pow)(n, 2) for n in range(count))
    return values


def test_parallel_in_function_runs_on_one_slot() -> None:
    with zd.local_cluster(workers=1) as one, joblib.parallel_config("zmqdist", target=one):
        assert joblib.Parallel(n_jobs=2)([joblib.delayed(square_all)(3)] * 2) == [[0, 1, 4]] * 2


def fail_or_sleep(number: int, path: str) -> None:
    if not number:
        raise ValueError("as asked")
    for _ in range(200):
        if zd.cancelled():
            return
        time.sleep(0.05)
    Path(path).touch()


def test_error_ends_functions_that_run(cluster: zd.local_cluster, tmp_path: Path) -> None:
    ended_late = tmp_path / "late"
    with pytest.raises(ValueError, match="as asked"):
        joblib.Parallel(n_jobs=2)(
            joblib.delayed(fail_or_sleep)(number, str(ended_late)) for number in (1, 0)
        )
    assert square_all(3) == [0, 1, 4]
    assert not ended_late.exists()


def write_and_sum(array: Any, row: int) -> float:
    array[0, 0] += 1.0
    return float(array[row].sum())


def test_large_argument_is_private_to_each_function(cluster: zd.local_cluster) -> None:
    array = np.ones((100, 10_000))
    sums = joblib.Parallel(n_jobs=2)(
        joblib.delayed(write_and_sum)(array, row) for row in range(100)
    )
    assert sums[1:] == [10_000.0] * 99
    assert array[0, 0] == 1.0


def test_threads_of_blas_are_bounded(cluster: zd.local_cluster) -> None:
    pytest.importorskip("threadpoolctl")

    def threads() -> list[int]:
        import threadpoolctl

        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]

    with joblib.parallel_config("zmqdist", target=cluster, inner_max_num_threads=1):
        first, second = joblib.Parallel()([joblib.delayed(threads)()] * 2)
    assert {*first, *second} <= {1}


def test_backend_without_cluster_says_what_to_give(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import joblib, zmqdist.integrations.joblib
        joblib.Parallel(n_jobs=-1, backend="zmqdist")([joblib.delayed(abs)(-1)])
    """)
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "target" in ran.stderr.splitlines()[-1]


def test_batches_of_short_functions_grow_fast() -> None:
    backend = ZmqdistBackend()
    backend.parallel = joblib.Parallel()
    sizes = [backend.compute_batch_size()]
    for duration_s in (0.001, 0.001, 0.04, 0.1, 0.1):
        backend.batch_completed(sizes[-1], duration_s)
        sizes.append(backend.compute_batch_size())
    # joblib's own rule bounds the last steps
    assert sizes == [1, 8, 64, 128, 128, 128]


def first_of(data: Any, number: int) -> int:
    return int(data.shape[0])


@pytest.mark.parametrize("kind", ["pandas", "scipy.sparse", "torch"])
def test_large_argument_of_other_package_is_shared(
    cluster: zd.local_cluster, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    package = pytest.importorskip(kind)
    ones = np.ones((100, 1000))
    data = {
        "pandas": lambda: package.DataFrame(ones),
        "scipy.sparse": lambda: package.csr_matrix(ones),
        "torch": lambda: package.from_numpy(ones),
    }[kind]()
    shared = []
    scatter = zd.ClusterCoordinator.scatter
    monkeypatch.setattr(
        zd.ClusterCoordinator,
        "scatter",
        lambda self, value: (shared.append(value), scatter(self, value))[1],
    )
    counts = joblib.Parallel(n_jobs=2)(joblib.delayed(first_of)(data, n) for n in range(20))
    assert counts == [100] * 20
    assert [value is data for value in shared] == [True]


def test_backends_of_one_target_share_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = backends.independent_coordinator
    monkeypatch.setattr(
        backends, "independent_coordinator", lambda target: (made.append(target), make(target))[1]
    )
    with zd.local_cluster(workers=1) as one, zd.local_cluster(workers=2) as two:
        alive = [ZmqdistBackend(target) for target in (one, two, one)]
        assert [backend.effective_n_jobs(-1) for backend in alive] == [1, 2, 1]
        assert made == [one, two]
