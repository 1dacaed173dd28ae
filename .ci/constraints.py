"""Write constraints.txt anew: the newest versions that work together, for each Python that zmqdist
supports (make constraints).

pip chooses versions for the Python that runs it, so each of these Pythons must be on this host. The
program installs only pip itself, in temporary environments.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from versions import CONSTRAINTS, ROOT, TOOLS, find_python

PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")

HEAD: Final = """\
# What development and CI install, on Python 3.10 to 3.13; `make constraints` writes it. The packages that zmqdist may be used with
# are those of setup.cfg: `pip install zmqdist` does not read this file.
#
# What zmqdist itself needs:
"""


def resolve(minor: str) -> tuple[set[str], dict[str, str]]:
    """Return, for one Python, the names of the packages that zmqdist itself needs, and the versions
    of all packages for development."""
    python = find_python(minor)
    if python is None:
        sys.exit(
            f"make constraints needs Python {', '.join(PYTHONS)}, and {minor} is not on this "
            f"machine"
        )
    with tempfile.TemporaryDirectory() as folder:
        own, report = Path(folder, "bin", "python"), Path(folder, "report.json")
        subprocess.run([python.executable, "-m", "venv", folder], check=True)
        pip = [own, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        # The oldest pip that comes with a Python would download each wheel as a whole.
        subprocess.run([*pip, "--upgrade", "pip"], check=True)

        def versions(wanted: str) -> dict[str, str]:
            ask = [
                "--dry-run",
                "--ignore-installed",
                "--only-binary",
                ":all:",
                "--report",
                report,
                wanted,
            ]
            subprocess.run([*pip, *ask], cwd=ROOT, check=True)
            found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
            names = {
                re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in found
            }
            return {name: version for name, version in names.items() if name != "zmqdist"}

        return set(versions(".")), versions(".[dev,examples]")


def lines(name: str, found: dict[str, str]) -> list[str]:
    """Return the lines of one package. `found` has its version on each Python that needs it. If
    these versions differ, each of them has a line with its Pythons."""
    if len(set(found.values())) == 1:
        return [f"{name}=={found.popitem()[1]}"]
    made = []
    for version in dict.fromkeys(found.values()):  # in the order of the Pythons
        pythons = [minor for minor in PYTHONS if found.get(minor) == version]
        told = " or ".join(f'python_version == "{minor}"' for minor in pythons)
        if pythons[-1] == PYTHONS[-1]:
            told = f'python_version >= "{pythons[0]}"'
        made.append(f"{name}=={version} ; {told}")
    return made


def main() -> None:
    needed: set[str] = set()
    table: dict[str, dict[str, str]] = {}
    for minor in PYTHONS:
        print(f"Python {minor}", flush=True)
        own, found = resolve(minor)
        needed |= own
        for name, version in found.items():
            table.setdefault(name, {})[minor] = version
    parts = [
        [line for name in sorted(names) for line in lines(name, table[name])]
        for names in (needed, table.keys() - needed)
    ]
    CONSTRAINTS.write_text("\n".join([HEAD + "\n".join(parts[0]), TOOLS, *parts[1], ""]))


if __name__ == "__main__":
    main()
