"""Where the package is not installed, the folder cli/ stands in for `zmqdist_cli`, as the
installation maps it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _map_cli() -> None:
    if importlib.util.find_spec("zmqdist_cli") is not None:
        return
    folder = Path(__file__).resolve().parents[2] / "cli"
    spec = importlib.util.spec_from_file_location(
        "zmqdist_cli", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zmqdist_cli"] = module
    spec.loader.exec_module(module)


_map_cli()
