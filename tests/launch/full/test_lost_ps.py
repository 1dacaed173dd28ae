"""A ps that the launcher does not start again: the program learns it, and does not wait for the
ps.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.launch.helpers import LAUNCH, ON_PIPES, WITH_PS, Launched, agent_of

PROGRAM = """
    import numpy as np
    import zmqdist as zd

    strategy = zd.ParameterServerStrategy(zd.resolvers.TFConfigClusterResolver(), recovery_s=1000)
    with strategy.scope():
        variables = [zd.Variable(np.zeros(3)) for _ in range(2)]
    print("it runs", flush=True)
    try:
        while True:
            for variable in variables:
                variable.assign_add(np.ones(3))
    except zd.errors.PSUnavailableError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("run", "file", "reason"),
    [
        (ON_PIPES, WITH_PS, "its address is on "),
        (LAUNCH, WITH_PS.replace("{count: 2}", "{count: 2, restarts: 0}"), "killed by SIGKILL"),
    ],
    ids=["its host is lost", "it has no restarts left"],
)
def test_program_gives_up_lost_ps(
    launch: Callable[..., Launched], run: str, file: str, reason: str
) -> None:
    job = launch(PROGRAM, run=run, file=file)
    job.saw("it runs")
    ps = job.task("ps", 0)
    os.kill(agent_of(ps) if run == ON_PIPES else ps, signal.SIGKILL)
    text = job.saw("and `zmqdist launch` does not start it again")
    assert f"it ended ({reason}" in text
    assert job.ends() == 0, job.text


STARTING = """
    import zmqdist as zd
    try:
        zd.ParameterServerStrategy(zd.resolvers.TFConfigClusterResolver(), timeout=1000)
    except zd.errors.UnavailableError as error:
        print(error)
"""


def test_strategy_gives_up_failed_ps(
    launch: Callable[..., Launched],
) -> None:
    job = launch(
        STARTING,
        file=WITH_PS.replace("{count: 2}", "{count: 2, restarts: 0, env: {PYTHONHOME: /nowhere}}"),
    )
    text = job.saw("does not start it again")
    assert text.startswith("/job:ps/replica:0/task:")
    assert job.ends() == 0, job.text
