"""Whole programs whose workers are forked from a zygote: which modules they find, beside files that
imitate modules, and one that forks."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.helpers import FILE, Launched

IMITATE = """
import os, sys
def imitate(folder, mark):
    libraries = ("numpy", "zmq", "msgspec", "cloudpickle", "click", "yaml", "rich", "lz4", "zstandard", "ml_dtypes",
                 "pyarrow", "pandas", "fsspec", "torch", "ray", "zmqdist", "threadpoolctl", "gevent", "attr")
    for name in {*sys.stdlib_module_names, *libraries}:
        with open(os.path.join(folder, name + ".py"), "w") as file:
            file.write(f"import os\\nif os.getpid() != {os.getpid()}:\\n open({mark!r}, 'a').write(__name__ + '\\\\n')\\n"
                       "raise ImportError('imitated')\\n")
"""

PROGRAM = (
    IMITATE
    + """
import numpy as np
import zmqdist as zd
from zmqdist.process import zygote_client
if sys.argv[1] == "command":
    zygote_client.fork = lambda *args, **kwargs: None

def work():
    import mine
    import zmqdist.wire.arrays
    assert np.random.default_rng(1).random() < 1
    try:
        zmqdist.wire.arrays.dtype_from_json("bfloat16")
    except Exception:
        pass
    return mine.value, "b\\xfccher.example".encode("idna")

def trained(cluster):
    strategy = zd.ParameterServerStrategy(cluster)
    with strategy.scope():
        variable = zd.Variable(np.zeros(3))
    variable.assign_add(np.ones(3))
    return variable.numpy().tolist()

def all_of_it():
    with zd.local_cluster(workers=1, ps=1) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
        numbers = zd.data.Dataset.range(20).map(lambda x: np.full(9999, x)).batch(2)
        service = zd.data.experimental.service
        for compression in ("LZ4", "ZSTD", "GZIP"):
            read = numbers.apply(service.distribute("distributed_epoch", cluster, compression=compression))
            assert sum(len(batch) for batch in read) == 20
        return coordinator.schedule(work).get(), trained(cluster)

path, sys.path[:] = sys.path[:], [folder for folder in sys.path if folder not in ("", os.getcwd())]
all_of_it()  # everything that the program itself imports, before the imitations are there
zygote_client.close()
sys.path[:] = [*path, os.getcwd()]
here = os.path.dirname(os.path.abspath(__file__))
for folder in (os.getcwd(), here):
    imitate(folder, os.path.join(here, "imitated"))
print(all_of_it())
"""
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["zygote", "command"])
def test_program_files_shadow_no_child_module(tmp_path: Path, how: str) -> None:
    """Workers nevertheless find the user's own modules there."""
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    folder.mkdir()
    script.write_text(PROGRAM)
    (tmp_path / "mine.py").write_text("value = 7\n")
    result = subprocess.run(
        [sys.executable, script, how],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    imitated = tmp_path / "imitated"
    assert not imitated.exists(), imitated.read_text()
    assert (result.stdout, result.stderr) == (
        "((7, b'xn--bcher-kva.example'), [1.0, 1.0, 1.0])\n",
        "",
    )


PATHS = """
import os, sys
import zmqdist as zd
sys.path += EXTRA
def seen():
    import beside
    return sys.path, beside.value
with zd.local_cluster(workers=1) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
    path, value = coordinator.schedule(seen).get()
assert path == list(dict.fromkeys(os.path.abspath(folder) for folder in sys.path)), (path, sys.path)
print(value)
"""


def _script(folder: Path, extra: str = "[]") -> Path:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    script = folder / "pkg" / "main.py"
    script.write_text(PATHS.replace("EXTRA", extra))
    return script


def _beside(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text("value = 5\n")


def _of_a_file(folder: Path) -> list[str]:
    script = _script(folder)
    _beside(script.parent)
    return [str(script)]


def _of_a_module(folder: Path) -> list[str]:
    _script(folder)
    _beside(folder)
    return ["-m", "pkg.main"]


def _of_a_text(folder: Path) -> list[str]:
    _beside(folder)
    return ["-c", PATHS.replace("EXTRA", "[]")]


def _of_an_archive(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "program.zip", "w") as archive:
        archive.writestr("__main__.py", PATHS.replace("EXTRA", "[]"))
        archive.writestr("beside.py", "value = 5\n")
    return [str(folder / "program.zip")]


def _with_a_folder_added(folder: Path) -> list[str]:
    _beside(folder / "more")
    return [str(_script(folder, "['more']"))]


def _with_pythonpath(folder: Path) -> list[str]:
    _beside(folder / "on_pythonpath")
    return [str(_script(folder))]


@pytest.mark.parametrize(
    "program",
    [_of_a_file, _of_a_module, _of_a_text, _of_an_archive, _with_a_folder_added, _with_pythonpath],
)
def test_functions_see_module_path_in_order(
    tmp_path: Path, program: Callable[[Path], list[str]]
) -> None:
    arguments = program(tmp_path)
    environment = {**os.environ, "PYTHONPATH": "on_pythonpath"}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=environment,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "5\n", "")


LAUNCHED = """
    import os, sys
    import zmqdist as zd

    def seen():
        import beside
        return os.getcwd() in sys.path, beside.value

    with zd.coordinator.ClusterCoordinator() as coordinator:
        print(*coordinator.schedule(seen).get())
"""


@pytest.mark.parametrize(
    ("command", "printed"),
    [("python src/program.py", "False 5"), ("python -m src.program", "True 3")],
)
def test_roles_have_program_folder_on_path(
    launch: Callable[..., Launched], tmp_path: Path, command: str, printed: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "beside.py").write_text("value = 3\n")
    (tmp_path / "src" / "beside.py").write_text("value = 5\n")
    job = launch(LAUNCHED, file=FILE.replace("python program.py", command))
    (tmp_path / "program.py").rename(tmp_path / "src" / "program.py")
    assert job.ends() == 0, job.text
    assert job.lines == [printed]


FORKED = """
import os, sys
import zmqdist as zd
with zd.local_cluster(workers=1):
    pass
pid = os.fork()
with zd.local_cluster(workers=1) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
    assert coordinator.schedule(sum, ([1, 2],)).get(20) == 3
if not pid:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


def test_forked_program_has_own_zygote() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=50, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
