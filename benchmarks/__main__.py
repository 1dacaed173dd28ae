"""`python -m benchmarks NAME ... [--against raw,pool,...]`: measure speed and size. NAME is a
question, which has a file in this folder; `all` means all questions.

Each system takes turns with zmqdist, in blocks of a fraction of a second. A system that is not
installed is left out, and a line says so; `pip install zmqdist[bench]` installs most systems.
`python -m benchmarks regress --against REV` compares this checkout with a revision (regress.py).

Systems whose packages cannot be installed together may each have a Python of their own: name it
with --python, or in an environment variable such as ZMQDIST_BENCH_PYTHON_RAY or
ZMQDIST_BENCH_PYTHON_TF.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks import (
    actors,
    bandwidth,
    calls,
    captured,
    collectives,
    data_arrays,
    data_elements,
    data_first,
    data_images,
    data_start,
    fanout,
    greedy,
    imports,
    latency,
    memory,
    ps_model,
    ps_rows,
    ps_tasks,
    regress,
    results,
    roundtrip,
    scale,
    servers,
    startup,
    tasks,
    variables,
)
from benchmarks.measuring import FULL, QUICK, Question, measure, to_stderr
from benchmarks.systems import SYSTEMS
from zmqdist import __version__

MODULES = (
    latency,
    calls,
    actors,
    tasks,
    roundtrip,
    bandwidth,
    fanout,
    captured,
    startup,
    imports,
    memory,
    scale,
    servers,
    greedy,
    collectives,
    variables,
    ps_tasks,
    ps_rows,
    ps_model,
    data_elements,
    data_arrays,
    data_images,
    data_first,
    data_start,
)
QUESTIONS: dict[str, Question] = {module.QUESTION.name: module.QUESTION for module in MODULES}
PAGE = "performance.md"


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["regress"]:
        return regress.main(words[1:], QUESTIONS)
    given = _given(words)
    names = list(QUESTIONS) if "all" in given.names else given.names
    against = [SYSTEMS[name] for name in given.against]
    questions = [QUESTIONS[name] for name in names]
    answers, versions = measure(
        questions, against, QUICK if given.quick else FULL, given.python, to_stderr
    )
    documents = [
        results.document(found, versions, _command(name, given)) for name, found in answers.items()
    ]
    for found in documents:
        print(
            "\n".join(
                [*results.table(found).lines(), *(f"  {line}" for line in found["skipped"]), ""]
            )
        )
    if given.json:
        given.json.write_text(results.written(documents))
    if given.history:
        results.note_history(given.history, documents, __version__)
    if given.plot:
        _draw(documents, Path())
    if given.write:
        given.write.mkdir(parents=True, exist_ok=True)
        for found in documents:
            (given.write / f"{found['question']}.json").write_text(results.written([found]))
        _draw(documents, given.write)
        page = given.write.parent / PAGE
        if page.exists():
            results.rewrite(page, given.write, QUESTIONS)
    return 0


def _given(arguments: list[str]) -> argparse.Namespace:
    about = "\n".join(f"{name:<12}{question.title}" for name, question in QUESTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"questions:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="questions, or all")
    parser.add_argument(
        "--against",
        type=systems_named,
        default=list(SYSTEMS),
        metavar="SYSTEM,...",
        help=f"of {','.join(SYSTEMS)}, where tf and ray take in tf-data and so on; or none "
        f"(default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller blocks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        help="write the ratios there, into the line of this version",
    )
    parser.add_argument(
        "--plot", action="store_true", help="draw NAME.png in this folder; needs matplotlib"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DIR",
        help=f"JSON and plots go there, a list into {PAGE} above",
    )
    parser.add_argument(
        "--python",
        type=_python,
        action="append",
        default=[],
        metavar="SYSTEM=PATH",
        help="the interpreter that has a system's packages",
    )
    given = parser.parse_args(arguments)
    given.python = dict(given.python)
    unknown = [name for name in given.names if name not in QUESTIONS and name != "all"]
    if unknown:
        parser.error(f"no question {unknown[0]!r}; there are: {', '.join(QUESTIONS)}")
    return given


def systems_named(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"no system {name!r}; there are: {', '.join(SYSTEMS)}")
    taken = [
        other
        for name in names
        for other, system in SYSTEMS.items()
        if name in (other, system.owner)
    ]
    return list(dict.fromkeys(taken))


def _python(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not path or name not in {system.owner for system in SYSTEMS.values()}:
        raise argparse.ArgumentTypeError(f"{text!r} is not SYSTEM=PATH")
    return name, path


def _command(name: str, given: argparse.Namespace) -> str:
    """Return the command that measures this question again, without the paths of interpreters,
    which differ from host to host."""
    words = ["python", "-m", "benchmarks", name]
    words += ["--quick"] if given.quick else []
    words += (
        [] if given.against == list(SYSTEMS) else ["--against", ",".join(given.against) or "none"]
    )
    return shlex.join(words)


def _draw(documents: list[results.Document], folder: Path) -> None:
    from benchmarks.plots import draw

    for found in documents:
        try:
            draw(found, folder / f"{found['question']}.png")
        except ImportError as error:
            to_stderr(f"no plots: {error}")
            return


if __name__ == "__main__":
    sys.exit(main())
