"""Run the pure tests on other Pythons, with the oldest and with the newest packages that setup.cfg
allows (make versions).

    3.10    with the minimum version of each package that zmqdist needs
    3.12    with the versions of constraints.txt
    3.13    with the newest versions

Each of these runs has an environment of its own below .venvs/. The program makes the environment
anew when setup.cfg, setup.py, constraints.txt or the Python has changed. In each environment the
packages that only the tests need have the versions of constraints.txt. If a Python is not on this
host, the program leaves out its run, and prints a line that says so.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
CONSTRAINTS: Final = ROOT / "constraints.txt"
TOOLS: Final = "# What its tests, its checks and its examples need beyond that:"
"""The line of constraints.txt that follows the packages that zmqdist itself needs."""

ENVIRONMENTS: Final = (("3.10", "minimum"), ("3.12", "constraints"), ("3.13", "newest"))

TESTS: Final = (
    "tests",
    "--tier=pure",
    "--seeds=20",
    "-q",
    "-n2",
    "--dist=loadfile",
    "--max-worker-restart=0",
    "-p",
    "no:cacheprovider",
)
"""The arguments of pytest. There are few seeds, because the simulations do not depend on the
versions of packages. After the death of a worker the run ends: with a new worker it may hang."""

_ASK: Final = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2], sys.version.split()[0], sys.executable)"


_BUILDING: Final = threading.Lock()
"""Held while setuptools builds, because setuptools writes into the checkout. Threads make the
environments at the same time, because pip mostly waits for the network."""


class Python(NamedTuple):
    version: str
    executable: str


def find_python(minor: str) -> Python | None:
    """Return the Python with this minor version, such as "3.10", from PATH, or else the newest of
    pyenv. It must be able to make virtual environments. Return None if there is no such Python."""
    name = f"python{minor}"
    found = [str(Path(folder) / name) for folder in os.get_exec_path()]
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        root = Path(
            subprocess.run(
                [pyenv, "root"], capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        versions = [
            path for path in root.glob(f"versions/{minor}.*") if path.name.split(".")[-1].isdigit()
        ]
        versions.sort(key=lambda path: int(path.name.split(".")[-1]), reverse=True)
        found += [str(path / "bin" / name) for path in versions]
    for candidate in filter(os.path.exists, found):
        asked = subprocess.run([candidate, "-c", _ASK], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.startswith(
            f"{minor} "
        ):  # pyenv has a shim for each version, usable or not
            _, version, executable = asked.stdout.strip().split(" ", 2)
            return Python(version, executable)
    return None


def requirements(extra: str | None = None) -> list[str]:
    """Return the requirements of zmqdist, or of one of its extras, from setup.cfg."""
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    text = (
        config["options"]["install_requires"]
        if extra is None
        else config["options.extras_require"][extra]
    )
    return [line for line in text.split("\n") if line and not line.startswith("#")]


def constraints(which: str) -> str:
    """Return the text of a constraints file: "minimum", "constraints" or "newest"."""
    text = CONSTRAINTS.read_text()
    tools = text.partition(f"{TOOLS}\n")[2]
    assert tools, f"{CONSTRAINTS.name} has no line {TOOLS!r}"
    minimum = "".join(f"{line.replace('>=', '==')}\n" for line in requirements())
    return {"minimum": tools + minimum, "constraints": text, "newest": tools}[which]


def make_environment(python: Python, which: str) -> Path:
    """Make an environment, unless it exists and was made from the same inputs. Return the path of
    its Python."""
    folder = ROOT / ".venvs" / f"{python.version}-{which}"
    own, stamp = folder / "bin" / "python", folder / "ready"
    chosen = constraints(which)
    inputs = [
        chosen,
        python.executable,
        *(ROOT.joinpath(name).read_text() for name in ("setup.py", "setup.cfg")),
    ]
    wanted = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return own
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python.executable, "-m", "venv", folder], check=True)
    (folder / "constraints.txt").write_text(chosen)
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Install only wheels: a minimum version without a wheel is too old, because many users cannot
    # compile it.
    wheels = ["--only-binary", ":all:", "-c", folder / "constraints.txt"]
    subprocess.run(
        [*pip, *wheels, "setuptools>=70.1", *requirements(), *requirements("test")], check=True
    )
    with _BUILDING:
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", "."], cwd=ROOT, check=True)
    stamp.write_text(wanted)
    return own


def run_tests(python: Python, which: str, own: Path) -> bool:
    """Print the versions in an environment, and run the tests there. Return whether all tests
    passed."""
    names = [requirement.partition(">=")[0] for requirement in requirements()]
    ask = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {names}))"
    versions = subprocess.run(
        [own, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(f"== Python {python.version}, {which}: {versions}", flush=True)
    return subprocess.run([own, "-m", "pytest", *TESTS], cwd=ROOT, check=False).returncode == 0


def main() -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    found = []
    for minor, which in ENVIRONMENTS:
        python = find_python(minor)
        if python is None:
            print(f"== left out: Python {minor} ({which}) is not on this machine", flush=True)
        else:
            found.append((python, which))
    with ThreadPoolExecutor() as pool:
        environments = [pool.submit(make_environment, python, which) for python, which in found]
    results = [
        run_tests(*each, made.result()) for each, made in zip(found, environments, strict=True)
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
