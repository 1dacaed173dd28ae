"""Packaging: setup.cfg has all settings that are plain data; this file only finds the packages.

The folder cli/ is installed as the package `zmqdist_cli`, because a package `cli` in site-packages
could clash with others. The list of packages is computed, because a list written by hand could lack
a new package, and an editable install would not show the gap.

An editable install gets a folder with a link to each package, which stands in site-packages as a
path. Without it setuptools installs a hook of the import instead, which type checkers and editors
do not run, so that they do not find zmqdist.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup

LINKS = ".editable"

if "editable_wheel" in sys.argv:
    Path(LINKS).mkdir(exist_ok=True)
    for name, folder in (("zmqdist", "zmqdist"), ("zmqdist_cli", "cli")):
        link = Path(LINKS, name)
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", folder))
    setup(package_dir={"": LINKS}, packages=find_packages(LINKS))
else:
    setup(
        package_dir={"zmqdist_cli": "cli"},
        packages=[
            *find_packages(include=["zmqdist", "zmqdist.*"]),
            "zmqdist_cli",
            *(f"zmqdist_cli.{name}" for name in find_packages("cli")),
        ],
    )
