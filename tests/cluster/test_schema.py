"""The JSON Schema agrees with the parser: on what is right, and on each mistake of structure.

The real validator is used where it is installed; otherwise the few keywords that the schema uses
are checked here.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from typing import Any

import yaml

from tests.cluster.samples import RIGHT, STRUCTURE
from zmqdist.cluster import schema

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def fits(value: Any, rule: dict[str, Any], top: dict[str, Any]) -> bool:
    """Whether a value fits a rule. Raises KeyError for a keyword that is not known here."""
    return all(_KEYWORDS[key](value, expected, rule, top) for key, expected in rule.items())


def _has_type(value: Any, expected: str | list[str]) -> bool:
    names = [expected] if isinstance(expected, str) else expected
    return any(
        isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in names
    )


def _is_number(value: Any) -> bool:
    return _has_type(value, "number")


_KEYWORDS: dict[str, Any] = {
    **dict.fromkeys(("$schema", "$defs", "title", "description", "default"), lambda *_: True),
    "$ref": lambda v, w, r, top: fits(v, top["$defs"][w.rpartition("/")[2]], top),
    "type": lambda v, w, r, top: _has_type(v, w),
    "enum": lambda v, w, r, top: v in w and not isinstance(v, bool),
    "anyOf": lambda v, w, r, top: any(fits(v, entry, top) for entry in w),
    "oneOf": lambda v, w, r, top: sum(fits(v, entry, top) for entry in w) == 1,
    "required": lambda v, w, r, top: not isinstance(v, dict) or set(w) <= set(v),
    "properties": lambda v, w, r, top: (
        not isinstance(v, dict) or all(fits(v[key], w[key], top) for key in w if key in v)
    ),
    "additionalProperties": lambda v, w, r, top: (
        not isinstance(v, dict)
        or all(
            w is not False and (w is True or fits(item, w, top))
            for key, item in v.items()
            if key not in r.get("properties", {})
        )
    ),
    "propertyNames": lambda v, w, r, top: (
        not isinstance(v, dict) or all(fits(key, w, top) for key in v)
    ),
    "minProperties": lambda v, w, r, top: not isinstance(v, dict) or len(v) >= w,
    "items": lambda v, w, r, top: not isinstance(v, list) or all(fits(item, w, top) for item in v),
    "minItems": lambda v, w, r, top: not isinstance(v, list) or len(v) >= w,
    "pattern": lambda v, w, r, top: not isinstance(v, str) or re.search(w, v) is not None,
    "minLength": lambda v, w, r, top: not isinstance(v, str) or len(v) >= w,
    "maxLength": lambda v, w, r, top: not isinstance(v, str) or len(v) <= w,
    "minimum": lambda v, w, r, top: not _is_number(v) or v >= w,
    "maximum": lambda v, w, r, top: not _is_number(v) or v <= w,
    "exclusiveMinimum": lambda v, w, r, top: not _is_number(v) or v > w,
}


def accepts(text: str) -> bool:
    """Whether the schema accepts a YAML text, seen as JSON (as editors do: keys become texts)."""
    data = json.loads(json.dumps(yaml.safe_load(text)))
    top, validator = _checked()
    fitting = fits(data, top, top)
    if validator is not None:
        assert validator.is_valid(data) == fitting, text
    return fitting


@functools.cache
def _checked() -> tuple[dict[str, Any], Any]:
    """The schema, and the real validator of it; made once, because to check a schema takes longer
    than any file does."""
    top = schema()
    if importlib.util.find_spec("jsonschema") is None:
        return top, None
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(top)
    return top, Draft202012Validator(top)


def test_schema_accepts_right_files() -> None:
    assert [name for name, text in RIGHT.items() if not accepts(text)] == []


def test_schema_refuses_structural_mistakes() -> None:
    assert [name for name, (text, _) in STRUCTURE.items() if accepts(text)] == []


def test_schema_keys_have_descriptions() -> None:
    schema_dict = schema()
    untold = [
        f"{section}.{key}"
        for section, rule in schema_dict["$defs"].items()
        for key, entry in rule["properties"].items()
        if "description" not in entry
    ]
    assert untold == []


def test_schema_is_a_fresh_dict() -> None:
    schema()["$defs"].clear()
    assert schema()["$defs"]
