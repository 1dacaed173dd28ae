"""`python -m benchmarks [NAME] [--json]`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys

import benchmarks
from zmqdist.observe.bench import machine
from zmqdist_cli.bench import row


def main(words: list[str]) -> int:
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__")
    wanted = [word for word in words if not word.startswith("-")]
    if len(wanted) != 1 or wanted[0] not in names:
        print(f"usage: python -m benchmarks NAME [--json]; NAME is one of: {', '.join(names)}", file=sys.stderr)
        return 2
    figures = list(importlib.import_module(f"benchmarks.{wanted[0]}").run())
    if "--json" in words:
        print(
            json.dumps({"machine": machine(), "figures": [dataclasses.asdict(figure) for figure in figures]}, indent=2)
        )
    else:
        print(machine())
        print("\n".join(map(row, figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
