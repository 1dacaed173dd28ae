"""Packaging: setup.cfg has all settings that are plain data; this file only finds the packages.

The folder cli/ is installed as the package `zmqdist_cli`, because a package `cli` in site-packages could clash with others. The list of
packages is computed, because a list written by hand could lack a new package, and an editable install would not show the gap.
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
