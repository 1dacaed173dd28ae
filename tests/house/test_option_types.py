"""The options that type checkers know are those of the constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.scheduling.shared.option_types import CoordinatorOptions, DispatcherOptions


@pytest.mark.parametrize(
    ("options", "call", "others"),
    [
        (CoordinatorOptions, zd.ClusterCoordinator.__init__, {"self", "target"}),
        (
            DispatcherOptions,
            DispatcherConfig.__init__,
            {"self", "token_file", "keys_dir", "insecure"},
        ),
    ],
)
def test_options_for_type_checkers_are_those_of_call(
    options: Any, call: Callable[..., Any], others: set[str]
) -> None:
    parameters = inspect.signature(inspect.unwrap(call)).parameters.values()
    expected = {each.name: each.annotation for each in parameters if each.name not in others}
    types = {name: known.__forward_arg__ for name, known in options.__annotations__.items()}
    assert types == expected
