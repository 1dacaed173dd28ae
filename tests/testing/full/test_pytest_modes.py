"""Functions of a test module arrive in their task whichever way pytest has imported it."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_arrive_in_pytest_modes(pytester: pytest.Pytester, mode: str) -> None:
    pytester.mkdir("deep")
    (pytester.path / "deep" / "test_mine.py").write_text(
        """
from zmqdist.testing import create_cluster_spec, run
import pytest

class Mine(Exception):
    pass

def helper():
    return 7

def work(fail):
    if fail:
        raise Mine(helper())
    return helper()

def test_it():
    assert run(work, create_cluster_spec(), args=(False,)).return_value == [7]
    with pytest.raises(Mine):
        run(work, create_cluster_spec(), args=(True,))
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", f"--import-mode={mode}")
    result.assert_outcomes(passed=1)
