"""Functions of a map in child processes: errors, ends, states and forks. Each test starts one or two processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.data.test_parallel import Unfit, numbers, settled
from zmqdist.data import Dataset, Options
from zmqdist.errors import InvalidArgumentError


def test_an_error_in_a_process_keeps_class_text_and_place() -> None:
    def fails(x: Any) -> Any:
        if x == 1:
            raise Unfit("unfit", int(x))
        if x == 3:
            return object()
        return x

    found = settled(iter(Dataset.range(5).map(fails, num_parallel_calls=2, executor="process")))
    assert isinstance(found[1], Unfit)
    assert (str(found[1]), found[1].place) == ("unfit at 1", 1)
    assert "in fails" in str(found[1].__cause__)
    assert isinstance(found[3], InvalidArgumentError)
    assert [found[0], found[2], found[4]] == [0, 2, 4]


@pytest.mark.parametrize("above", [lambda dataset: dataset, lambda dataset: dataset.prefetch(2)])
def test_closing_ends_children_that_would_never_return(above: Any) -> None:
    def endless(x: Any) -> Any:
        while x:
            time.sleep(1000)
        return x

    iterator = iter(above(Dataset.range(3).map(endless, num_parallel_calls=2, executor="process")))
    assert next(iterator) == 0
    iterator.close()  # the fixture of all tests looks whether children are left


def test_a_process_map_goes_on_from_a_state() -> None:
    dataset = Dataset.range(6).map(lambda x: x * 10, executor="process", num_parallel_calls=2)
    with iter(dataset) as iterator:
        found = [int(next(iterator)) for _ in range(2)]
        state = json.loads(json.dumps(iterator.state_dict()))
    with iter(dataset) as other:
        other.load_state_dict(state)
        assert found + numbers(other) == [0, 10, 20, 30, 40, 50]


def test_without_order_a_ready_process_is_not_held_up() -> None:
    options = Options()
    options.deterministic = False
    dataset = Dataset.range(3).map(
        lambda x: time.sleep(1000 if x == 0 else 0) or x, executor="process", num_parallel_calls=2
    )
    with iter(dataset.with_options(options)) as iterator:
        assert [int(next(iterator)), int(next(iterator))] == [1, 2]


def test_a_process_map_works_in_a_process_that_was_forked() -> None:
    program = """
import os
from zmqdist.data import Dataset
pid = os.fork()
if pid == 0:
    print([int(x) for x in Dataset.range(3).map(lambda x: x + 1, executor="process")], flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[1, 2, 3]"), done.stderr


def test_what_a_function_prints_in_a_process_is_not_lost() -> None:
    program = (
        "from zmqdist.data import Dataset; list(Dataset.range(2).map(lambda x: print('seen') or x, executor='process'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    # Without Python's buffer (PYTHONUNBUFFERED) the text and the end of its line are two writes, and another process may write between.
    assert (done.returncode, done.stdout.count("seen")) == (0, 2), done.stderr
