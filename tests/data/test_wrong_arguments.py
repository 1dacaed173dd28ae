"""Arguments of datasets that are of the wrong kind: the error names the argument, and what it
wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zmqdist.data import Dataset

TEN = Dataset.range(10)

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "map": (
        lambda: TEN.map(lambda x: x, output_signature=5),
        "output_signature holds TensorSpecs .* not 5",
    ),
    "map, a list": (
        lambda: TEN.map(lambda x: x, output_signature=[]),
        r"output_signature holds TensorSpecs .* not \[\]",
    ),
    "map, inside": (
        lambda: TEN.map(lambda x: x, output_signature={"a": "x"}),
        "output_signature .* not 'x'",
    ),
    "generator": (
        lambda: Dataset.from_generator(list, output_signature="x"),
        "output_signature .* not 'x'",
    ),
    "source": (
        lambda: Dataset.from_source([1], output_signature=True),
        "output_signature .* not True",
    ),
    "load": (
        lambda: Dataset.load("/nowhere", element_spec=5),
        "element_spec holds TensorSpecs .* not 5",
    ),
    "flat_map": (
        lambda: list(TEN.flat_map(lambda x: x)),
        "the function of flat_map must return a Dataset",
    ),
    "interleave": (
        lambda: list(TEN.interleave(lambda x: x)),
        "the function of interleave must return a Dataset",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_argument_of_wrong_kind_is_named(case: str) -> None:
    use, text = CASES[case]
    with pytest.raises(TypeError, match=text):
        use()
