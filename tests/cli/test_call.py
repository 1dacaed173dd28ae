"""`zmqdist call` and `zmqdist methods`: what goes in, what comes out, and what goes wrong."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import zmqdist as zd
from tests.cli.conftest import Open
from tests.cli.helpers import run_here
from tests.cli.test_failures import assert_one_line
from tests.launch.helpers import eventually
from zmqdist import errors
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.rpc import ZmqServer
from zmqdist_cli import values
from zmqdist_cli.main import main

Pair = namedtuple("Pair", "left right")
INT = zd.TensorSpec((), np.int32)
FLOATS = zd.TensorSpec((None,), np.float32)

ANSWERS: dict[str, Any] = {
    "nothing": None,
    "yes": True,
    "large": 2**70 + 1,
    "half": 0.5,
    "nan": float("nan"),
    "endless": [math.inf, -math.inf],
    "complex": 1 - 2j,
    "text": "h\u00e9 \x1b[2J \x9b \U0001f600",
    "bytes": b"\x00\xff",
    "tuple": (1, (2, 3)),
    "pair": Pair(1, "r"),
    "keys": {1: "a", (2, 3): None},
    "scalar": np.float32(0.5),
    "long": np.longdouble(1),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "nans": np.array([0.5, np.nan], np.float32),
    "complexes": np.array([1j]),
    "days": np.array(["2026-11-21"], "datetime64[D]"),
    "inside": {"a": np.arange(2), "b": np.uint8(7)},
    "empty": np.zeros((0, 3)),
}


def echo(*args: Any, **named: Any) -> Any:
    """Give back what came.

    Not shown.
    """
    return [list(args), named]


def scale(array: Any, by: Any = 10) -> Any:
    """Multiply."""
    return array * by


def fails(kind: str = "ValueError") -> None:
    if kind == "op":
        raise errors.NotFoundError(None, None, "no such\nthing")
    raise {"ValueError": ValueError, "KeyError": KeyError}[kind]("wrong\nand more")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ZmqServer("127.0.0.1:0")
    server.register("echo", echo, inline=True)
    server.register("scale", scale, [FLOATS, zd.TensorSpec((), np.float32)], FLOATS, inline=True)
    server.register(
        "shape", lambda pair: [str(type(pair).__name__), *pair], [(INT, INT)], inline=True
    )
    server.register(
        "kind", lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}", inline=True
    )
    server.register("answer", lambda name: ANSWERS[name], inline=True)
    server.register("fails", fails, inline=True)
    server.register("odd.name", lambda: "reached", inline=True)
    server.register("close", lambda: "reached, too", inline=True)
    with server:
        yield server.address


@pytest.fixture
def ask(address: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """ask("scale", "[1]"): (exit code, standard output, standard error)."""

    def asked(*words: str) -> tuple[int, str, str]:
        code = main(["call", address, *words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return asked


# -- words as values -------------------------------------------------------------------------------

WORDS: list[tuple[str, Any]] = [
    ("3", 3),
    ("-3", -3),
    ("12345678901234567890123", 12345678901234567890123),
    ("2.5e3", 2500.0),
    (".5", 0.5),
    ("-1.", -1.0),
    ("+7", 7),
    ("1+2j", 1 + 2j),
    ("-.5e1j", -5j),
    ("true", True),
    ("True", True),
    ("null", None),
    ("None", None),
    ("NaN", math.nan),
    ("nan", math.nan),
    ("-inf", -math.inf),
    ("-Infinity", -math.inf),
    ('"3"', "3"),
    ("[1, [2.0]]", [1, [2.0]]),
    ('{"a": null}', {"a": None}),
    ("word", "word"),
    ("two words", "two words"),
    ("", ""),
    ("007", "007"),
    ("1.2.3", "1.2.3"),
    ("j", "j"),
    ("2026-11-21", "2026-11-21"),
    ("a+b", "a+b"),
    ('"@x"', "@x"),
]


@pytest.mark.parametrize(("word", "value"), WORDS, ids=[word for word, _ in WORDS])
def test_word_is_json_python_or_text(word: str, value: Any) -> None:
    received = values.value_of(word)
    assert type(received) is type(value)
    assert received == value or (received != received and value != value)


@pytest.mark.parametrize(
    "word", ["[1, 2", "{a: 1}", '"open', "--jsn", "-x", "1" * 5000, "@nowhere.npy", "[" * 100_000]
)
def test_ambiguous_word_is_refused(word: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        values.value_of(word)
    assert len(str(caught.value.message)) < 300


def test_files_are_arrays_json_or_bytes(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "a.npz", x=np.arange(2))
    (tmp_path / "a.json").write_text('{"a": [1]}')
    (tmp_path / "a.bin").write_bytes(b"\x00")
    np.testing.assert_array_equal(values.value_of(f"@{tmp_path / 'a.npy'}"), np.arange(3))
    np.testing.assert_array_equal(values.value_of(f"@{tmp_path / 'a.npz'}")["x"], np.arange(2))
    assert values.value_of(f"@{tmp_path / 'a.json'}") == {"a": [1]}
    assert values.value_of(f"@{tmp_path / 'a.bin'}") == b"\x00"
    for name in ("b.npy", "b.npz", "b.json"):
        (tmp_path / name).write_bytes(b"neither")
        with pytest.raises(click.UsageError, match="the content is not of the kind"):
            values.value_of(f"@{tmp_path / name}")


def test_pickle_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([print], object), allow_pickle=True)
    with pytest.raises(click.UsageError, match="the content is not of the kind"):
        values.value_of(f"@{tmp_path / 'a.npy'}")


def test_lists_become_what_a_signature_has() -> None:
    assert values.shaped_like((INT, [INT]), [1, [2]]) == (1, [2])
    assert values.shaped_like(Pair(INT, INT), {"right": 2, "left": 1}) == Pair(1, 2)
    assert values.shaped_like(Pair(INT, INT), [1, 2]) == Pair(1, 2)
    assert values.shaped_like({"a": (INT,)}, {"a": [1], "b": 2}) == {"a": (1,), "b": 2}
    for wrong in (3, [1], {"a": 1}, "ab"):
        assert values.shaped_like((INT, INT), wrong) == wrong


# -- values as text --------------------------------------------------------------------------------

SHOWN = {
    "nothing": "null",
    "yes": "true",
    "large": str(2**70 + 1),
    "half": "0.5",
    "nan": '"nan"',
    "endless": '["inf", "-inf"]',
    "complex": '"1-2j"',
    "text": '"h\u00e9 \\u001b[2J \\u009b \U0001f600"',
    "bytes": '"AP8="',
    "tuple": "[1, [2, 3]]",
    "pair": '{"left": 1, "right": "r"}',
    "keys": '{"1": "a", "(2, 3)": null}',
    "scalar": "0.5",
    "long": "1.0",
    "array": "[[0, 1, 2], [3, 4, 5]]",
    "nans": '[0.5, "nan"]',
    "complexes": '["0+1j"]',
    "days": '["2026-11-21"]',
    "inside": '{"a": [0, 1], "b": 7}',
    "empty": "[]",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_is_one_line_of_json(name: str, ask: Any) -> None:
    code, out, err = ask("answer", json.dumps(name), "--json")
    if name == "long":  # NumPy's own affair how it prints one
        assert json.loads(out) in ("1.0", 1.0)
        return
    shown = out.replace("1j", "0+1j") if name == "complexes" and "0+" not in out else out
    assert (code, shown, err) == (0, SHOWN[name] + "\n", "")
    assert json.loads(out) == json.loads(
        out, parse_constant=lambda _: pytest.fail("no JSON has it")
    )


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("array", "[[0, 1, 2],\n [3, 4, 5]]\nint16[2, 3]\n"),
        ("nans", "[0.5, nan]\nfloat32[2]\n"),
        ("empty", "[]\nfloat64[0, 3]\n"),
        ("scalar", "0.5\n"),
        ("inside", '{"a": [0, 1], "b": 7}\n'),
    ],
)
def test_array_printed_with_shape_and_dtype(name: str, out: str, ask: Any) -> None:
    assert ask("answer", name) == (0, out, "")


def test_long_answer_broken_into_lines(ask: Any) -> None:
    assert ask("echo", json.dumps(["word"] * 30))[1].count("\n") > 30
    assert ask("echo", json.dumps(["word"] * 30), "--json")[1].count("\n") == 1


# -- calls -----------------------------------------------------------------------------------------


def test_arguments_go_by_position_and_by_name(ask: Any) -> None:
    code, out, _ = ask("echo", "1", "-2", "word", 'x={"a": 1}', "y=z=1", "--json")
    assert (code, json.loads(out)) == (0, [[1, -2, "word"], {"x": {"a": 1}, "y": "z=1"}])


def test_lists_become_arrays_by_the_signature(ask: Any) -> None:
    assert ask("scale", "[1, 2.5]", "2") == (0, "[2., 5.]\nfloat32[2]\n", "")
    assert ask("scale", "[1, NaN]", "by=2", "--json") == (0, '[2.0, "nan"]\n', "")
    assert ask("shape", "[1, 2]", "--json") == (0, '["tuple", 1, 2]\n', "")
    assert ask("shape", "pair=[1, 2]", "--json") == (0, '["tuple", 1, 2]\n', "")


def test_values_arrive_unchanged_without_signature(ask: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(2, np.float16))
    for word, kind in [
        ("[1]", "list "),
        ("1", "int "),
        (f"@{tmp_path / 'a.npy'}", "ndarray float16"),
    ]:
        assert ask("kind", word) == (0, f'"{kind}"\n', "")


@pytest.mark.parametrize("name", ["odd.name", "close"])
def test_method_of_any_name_is_callable(name: str, ask: Any) -> None:
    code, out, _ = ask(name)
    assert (code, "reached" in out) == (0, True)


def test_answer_can_be_saved(ask: Any, tmp_path: Path) -> None:
    array, arrays, text, raw = (tmp_path / name for name in ("a.npy", "a.npz", "a.json", "a.bin"))
    code, out, err = ask("answer", "array", "-o", str(array))
    assert (code, out, err) == (0, "", f"{array}: int16[2, 3]\n")
    np.testing.assert_array_equal(np.load(array), ANSWERS["array"])
    assert ask("answer", "inside", "-o", str(arrays))[0] == 0
    with np.load(arrays) as matches:
        assert sorted(matches) == ["a", "b"]
    assert ask("answer", "pair", "-o", str(text))[0] == 0
    assert json.loads(text.read_text()) == {"left": 1, "right": "r"}
    assert ask("answer", "bytes", "-o", str(raw))[0] == 0
    assert raw.read_bytes() == b"\x00\xff"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("answer nothing -o a.npy", "a NoneType cannot be saved as a.npy: .npy takes an array"),
        ("answer array -o a.bin", "a ndarray cannot be saved as a.bin"),
        ("answer keys -o nowhere/a.json", "cannot write nowhere/a.json: No such file or directory"),
        ("answer endless -o a.json --json", "--output saves the answer and --json prints it"),
        ("ecko 1", "no method 'ecko' at {address} (did you mean echo?)"),
        ("xyz", "no method 'xyz' at {address} (there are: echo, scale,"),
        (
            "scale",
            (
                "scale: expected 1 to 2 arguments, given 0; it is scale(array: float32[?], by: "
                "float32[]=10) -> float32[?]"
            ),
        ),
        ("scale 1 2 3", "scale: expected 1 to 2 arguments, given 3"),
        ("scale [1] bye=2", "scale: got an unexpected keyword argument 'bye'"),
        ("echo a=1 a=2", "a is given twice"),
        ("echo a=1 2", "'2' follows an argument by name: put arguments by name last"),
        ("echo out=1", "out= would go to the client: pass the argument out of echo by position"),
        ("echo [1", "'[1' is no JSON"),
        ("echo --jsn", "no such option: '--jsn'; to pass it as text, write it in JSON"),
        ("echo 1 --timeout -1", "Invalid value for '--timeout'"),
        ("echo --role king", "Invalid value for '--role'"),
    ],
)
def test_mistake_is_one_line(
    words: str,
    message: str,
    ask: Any,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(*words.split())
    assert (code in (ExitCode.USAGE, ExitCode.PROGRAM_FAILED), out) == (True, "")
    assert message.format(address=address) in err
    assert_one_line(err)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("fails", ExitCode.USAGE, "INVALID_ARGUMENT: ValueError: wrong and more"),
        ("fails KeyError", ExitCode.PROGRAM_FAILED, "UNKNOWN: KeyError: 'wrong\\nand more'"),
        ("fails op", ExitCode.PROGRAM_FAILED, "NOT_FOUND: no such thing"),
        (
            "scale word",
            ExitCode.USAGE,
            "INVALID_ARGUMENT: scale: argument 0: expected float32, given str 'word'",
        ),
        (
            "fails 1 2 3",
            ExitCode.USAGE,
            "INVALID_ARGUMENT: fails: expected 0 to 1 arguments, given 3",
        ),
    ],
)
def test_remote_error_is_one_line_with_code(words: str, code: int, message: str, ask: Any) -> None:
    assert ask(*words.split()) == (code, "", f"zmqdist call: {message}\n")


def test_remote_traceback_shown_by_option(ask: Any) -> None:
    code, _, err = ask("fails", "--traceback")
    assert code == ExitCode.USAGE
    assert err.startswith(
        "zmqdist call: INVALID_ARGUMENT: ValueError: wrong and more\nTraceback (most recent call "
        "last)"
    )
    assert "in fails" in err
    assert ask("fails", "op", "--traceback")[2] == "zmqdist call: NOT_FOUND: no such thing\n"


def test_role_without_right_is_refused(dispatcher_here: str) -> None:
    there = dispatcher_here
    result = run_here("call", there, "drain", "worker", "0", "1.0")
    assert result.code == ExitCode.REFUSED
    assert (
        "zmqdist call: PERMISSION_DENIED: role client may not call drain (allowed: admin, submit)"
        in result.err
    )
    assert_one_line(result.err)
    result = run_here("call", there, "drain", "worker", "0", "1.0", "--role", "submit")
    assert (result.code, result.err) == (
        1,
        (
            "zmqdist call: NOT_FOUND: no worker worker:0 is registered here; the registered workers "
            "are: none\n"
        ),
    )
    result = run_here("call", there, "facts", "--json")
    assert json.loads(result.out)["address"] == there


def test_deadline_ends_call(capsys: pytest.CaptureFixture[str]) -> None:
    go = threading.Event()
    server = ZmqServer("127.0.0.1:0")
    server.register("wait", lambda: go.wait(20.0))
    with server:
        code = main(["call", server.address, "wait", "--timeout", "0.2"])
        go.set()
    assert code == ExitCode.UNAVAILABLE
    output = capsys.readouterr().err
    assert "zmqdist call: DEADLINE_EXCEEDED: " in output
    assert_one_line(output)


def test_silent_address_error_names_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{bound.getsockname()[1]}"
        for words in (
            ["call", dead, "echo", "--timeout", "0.2"],
            ["methods", dead, "--timeout", "0.2"],
        ):
            assert main(words) == ExitCode.UNAVAILABLE
            output = capsys.readouterr().err
            assert (
                f"no server answered at {dead} within 0.2 s: `zmqdist doctor {dead}` says why"
                in output
            )
            assert_one_line(output)


# -- methods ---------------------------------------------------------------------------------------


def test_methods_are_listed(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", f"zmq://{address}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0].split("  ")[0] == "echo(*args, **named)"
    assert lines[0].endswith("  Give back what came.")
    assert "scale(array: float32[?], by: float32[]=10) -> float32[?]  Multiply." in lines
    assert "odd.name()" in lines


def test_methods_as_json(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", address, "--json"]) == 0
    matches = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert matches["scale"]["parameters"] == [
        {"name": "array", "kind": "positional or keyword", "default": None},
        {"name": "by", "kind": "positional or keyword", "default": "10"},
    ]
    assert matches["scale"]["call"] == "scale(array: float32[?], by: float32[]=10) -> float32[?]"
    assert matches["scale"]["doc"] == "Multiply."
    assert (matches["scale"]["streaming"], matches["scale"]["batch"]) == (False, False)
    assert matches["echo"]["input_signature"] is None


# -- streams ---------------------------------------------------------------------------------------


def numbers(count: int) -> Iterator[Any]:
    """Count, and stumble at 3."""
    for number in range(count):
        if number == 3:
            raise ValueError("three")
        yield {"number": number}


def endless(folder: str) -> Iterator[int]:
    """Count for ever; says when it was closed."""
    try:
        yield from range(10**9)
    finally:
        (Path(folder) / "closed").touch()


@pytest.fixture
def streaming() -> Iterator[str]:
    server = ZmqServer("127.0.0.1:0")
    server.register("numbers", numbers)
    server.register("endless", endless)
    with server:
        yield server.address


def test_stream_printed_item_by_item(streaming: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["call", streaming, "numbers", "2"]) == 0
    assert capsys.readouterr().out == '{"number": 0}\n{"number": 1}\n'
    assert main(["call", streaming, "numbers", "9"]) == ExitCode.USAGE
    output = capsys.readouterr()
    assert output.out.count("\n") == 3
    assert output.err == "zmqdist call: INVALID_ARGUMENT: ValueError: three\n"
    assert main(["call", streaming, "numbers", "2", "-o", "a.npy"]) == ExitCode.USAGE
    assert (
        "numbers is a streaming method, and --output saves a single answer"
        in capsys.readouterr().err
    )
    assert main(["methods", streaming]) == 0
    assert "numbers(count) -> stream" in capsys.readouterr().out


def test_ctrl_c_ends_a_stream_there_too(streaming: str, terminal: Open, tmp_path: Path) -> None:
    shown = terminal("call", streaming, "endless", str(tmp_path))
    shown.saw("1000")
    shown.interrupt()
    assert shown.ends() == ExitCode.INTERRUPTED
    assert all(line.isdecimal() or not line for line in shown.lines)
    eventually((tmp_path / "closed").exists, "the generator is closed")


def test_closed_pipe_ends_stream(streaming: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m zmqdist_cli call {streaming} endless {tmp_path} | head -n 2; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=50, check=False
    )
    assert (result.stdout, result.stderr) == ("0\n1\n0\n", "")
    eventually((tmp_path / "closed").exists, "the generator is closed")


def test_deadline_ends_stream(streaming: str, tmp_path: Path) -> None:
    result = run_here("call", streaming, "endless", str(tmp_path), "--timeout", "0.5")
    assert result.code == ExitCode.UNAVAILABLE
    assert "zmqdist call: DEADLINE_EXCEEDED: " in result.err
    assert_one_line(result.err)
