"""Packaging: everything that is data stands in setup.cfg; this file only finds the packages.

The folder cli/ is installed as `zmqdist_cli`: a package called `cli` must not land in anybody's site-packages. The list is
computed, because a list written by hand forgets the next package, and an editable install does not notice.
"""

from setuptools import find_packages, setup

setup(
    package_dir={"zmqdist_cli": "cli"},
    packages=[
        *find_packages(include=["zmqdist", "zmqdist.*"]),
        "zmqdist_cli",
        *(f"zmqdist_cli.{name}" for name in find_packages("cli")),
    ],
)
