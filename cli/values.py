"""Values in a shell: convert the words of a command line to arguments of a call, and convert the
result of a call to text.

Input
    A word that is JSON is read as JSON: 3, 2.5, true, null, "text", [1, 2], {"a": 1}, NaN.
    Python's spellings of numbers and constants are read, too: True, False, None, .5, nan, -inf,
    1+2j.
    @FILE is the content of a file. A file .npy is an array, .npz is a dict of arrays by name, .json
    is JSON, and any other file is bytes. NAME=WORD is an argument by name.
    Any other word is a string. However, a word that begins with {, [ or " and is not JSON is a
    mistake, and so is a word that begins with - and is no number. To pass a string that would be
    read as another value, write it as JSON: '"3"', '"a=b"', '"@x"', '"-x"'.

Output
    Each value is printed as one line of JSON, or as several indented lines if it is long. Values
    that JSON does not have are converted: tuples to lists, namedtuples to dicts, keys to strings,
    bytes to base64, complex numbers to strings ("1+2j"), and numbers that are not finite to strings
    ("nan", "inf", "-inf").
    If the value is an array, it is printed as NumPy prints it, with dtype and shape. An array
    inside another value, and every array with --json, is printed as nested lists.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from zmqdist.files import open_regular
from zmqdist.specs import TensorSpec

_WORDS: Final = {"True": True, "False": False, "None": None}
_NUMBER: Final = re.compile(r"[+-]?(\d+\.\d*|\.\d+|0|[1-9]\d*)([eE][+-]?\d+)?|[+-]?(nan|inf)")
_COMPLEX: Final = re.compile(r"[+-]?[\d.][\d.eE+-]*j")
_NAMED: Final = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)
INDENT_ABOVE: Final = 100
"""The most characters of JSON that are printed on one line. Longer JSON is indented over several
lines."""


def arguments(words: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments that the words of a command line represent.
    Raises click.UsageError for a mistake."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    for word in words:
        match = _NAMED.fullmatch(word)
        if match is None:
            if named:
                raise click.UsageError(
                    f"{word!r} follows an argument by name: put arguments by name last"
                )
            args.append(value_of(word))
        elif match[1] in named:
            raise click.UsageError(f"{match[1]} is given twice")
        else:
            named[match[1]] = value_of(match[2])
    return args, named


def value_of(word: str) -> Any:
    """Return the value that one word of a command line represents. Raises click.UsageError for a
    mistake."""
    if word.startswith("@"):
        return _of_file(Path(word[1:]))
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(word)
    except (ValueError, RecursionError) as error:
        if word.startswith(("{", "[", '"')):
            raise click.UsageError(
                f"{_cut(word)} is no JSON ({error}): quote it for the shell, as '[1, 2]'"
            ) from None
        if word.lstrip("+-").isdigit() and len(word) > 1000:
            raise click.UsageError(f"{_cut(word)} is too long for a number") from None
    if _NUMBER.fullmatch(word):
        return float(word) if set(word.lower()) & set(".enf") else int(word)
    if _COMPLEX.fullmatch(word):
        try:
            return complex(word)
        except ValueError:
            pass
    if word.startswith("-"):
        raise click.UsageError(
            f"no such option: {_cut(word)}; to pass it as text, write it in JSON: '\"{word[:20]}\"'"
        )
    return word


def shaped_like(spec: Any, value: Any) -> Any:
    """Return `value` with its lists converted to the tuples and namedtuples that `spec` has in
    their place, because JSON has only lists. A value that does not fit `spec` is returned
    unchanged.
    """
    if isinstance(spec, dict) and isinstance(value, dict):
        return {
            key: shaped_like(spec[key], item) if key in spec else item
            for key, item in value.items()
        }
    if isinstance(spec, TensorSpec) or not isinstance(spec, (list, tuple)):
        return value
    fields = getattr(spec, "_fields", None)
    if fields and isinstance(value, dict) and value.keys() == set(fields):
        value = [value[field] for field in fields]
    if not isinstance(value, list) or len(value) != len(spec):
        return value
    items = [shaped_like(part, item) for part, item in zip(spec, value, strict=True)]
    return items if isinstance(spec, list) else type(spec)(*items) if fields else tuple(items)


def shown(value: Any, *, as_json: bool) -> str:
    """Return a value as text by the rules of the module's docstring. With `as_json`, the text is
    one line of JSON, also for arrays."""
    if isinstance(value, np.ndarray) and value.ndim and not as_json:
        return f"{np.array2string(value, separator=', ')}\n{value.dtype}[{', '.join(map(str, value.shape))}]"
    try:
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
        if not as_json and len(text) > INDENT_ABOVE:
            text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=2)
    except ValueError as error:
        # the value has an int with more digits than Python converts to text
        raise click.ClickException(f"the answer cannot be printed: {error}") from None
    readable = (sys.stdout.encoding or "").lower().startswith("utf")
    return "".join(
        char
        if char == "\n" or (char.isprintable() and (readable or char.isascii()))
        else json.dumps(char)[1:-1]
        for char in text
    )


def plain(value: Any) -> Any:
    """Return the result of a call with all parts converted to the types of JSON, by the rules of
    the module's docstring."""
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "mM":
            return value.astype(str).tolist()
        listed = value.tolist()
        if isinstance(listed, np.generic):  # a number with more bits than Python's float
            return str(listed)
        return plain(listed) if value.dtype.kind not in "bui" else listed
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return str(value).strip("()")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def save(value: Any, path: Path) -> str:
    """Write a value to a file. A file .npy takes an array, .npz a dict of arrays, .json any value,
    and any other file takes bytes. Return a summary of the value, such as "float32[3, 4]".

    Raises:
      click.ClickException: the value does not fit the name of the file, or the file cannot be
      written.
    """
    try:
        if path.suffix == ".npy" and not isinstance(value, (dict, bytes, type(None))):
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise ValueError("it holds objects, and only numbers and strings can be saved")
            np.save(path, array, allow_pickle=False)
            return f"{array.dtype}[{', '.join(map(str, array.shape))}]"
        if path.suffix == ".npz" and isinstance(value, dict):
            arrays = {str(key): np.asarray(item) for key, item in value.items()}
            if any(array.dtype.hasobject for array in arrays.values()):
                raise ValueError("it holds objects, and only numbers and strings can be saved")
            np.savez(path, **arrays)  # type: ignore[arg-type,unused-ignore]
            return f"{len(arrays)} arrays"
        if path.suffix == ".json":
            path.write_text(shown(value, as_json=True) + "\n")
            return "JSON"
        if isinstance(value, bytes):
            path.write_bytes(value)
            return f"{len(value)} bytes"
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise click.ClickException(f"cannot write {path}: {reason}") from None
    kind = type(value).__name__
    raise click.ClickException(
        f"a {kind} cannot be saved as {path.name}: .npy takes an array, .npz a dict of arrays, "
        f".json any value"
    )


def _of_file(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            if path.suffix == ".npy":
                return np.load(file, allow_pickle=False)
            if path.suffix == ".npz":
                with np.load(file, allow_pickle=False) as arrays:
                    return dict(arrays)
            data = file.read()
        return json.loads(data) if path.suffix == ".json" else data
    except OSError as error:
        raise click.UsageError(f"@{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, RecursionError) as error:
        raise click.UsageError(
            f"@{path}: the content is not of the kind that {path.suffix} stands for: {error}"
        ) from None


def _cut(word: str) -> str:
    return repr(word if len(word) <= 40 else word[:37] + "...")
