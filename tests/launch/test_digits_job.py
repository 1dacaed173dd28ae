"""The main job for three epochs, with a worker that is killed meanwhile; full/test_main_job.py
trains to the full accuracy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.helpers import Launched

ROOT = Path(__file__).resolve().parents[2]

SHORT = f"""
    import sys
    sys.path.insert(0, {str(ROOT / "examples")!r})
    import digits
    digits.EPOCHS = 3
    digits.plots.curves = lambda *_: None
    if __name__ == "__main__":
        digits.main()
"""


@pytest.mark.processes("digits example")
@pytest.mark.killed("digits example")
def test_three_epochs_are_trained_although_a_worker_is_killed(
    launch: Callable[..., Launched],
) -> None:
    file = (
        (ROOT / "configs" / "digits.yaml").read_text().replace("examples/digits.py", "program.py")
    )
    file = file.replace("slots: 1}", f"slots: 1, env: {{PYTHONPATH: {ROOT / 'examples'}}}}}")
    job = launch(SHORT, file=file)
    worker = job.task("worker", 1)
    job.saw("epoch  1/3")
    os.kill(worker, signal.SIGKILL)
    assert job.ends(50) == 0, job.text
    assert (
        job.lines.count("[worker-1] ended (killed by SIGKILL); it is started again (1 of 3)") == 1
    ), job.text
    assert [line[:10] for line in job.lines if line.startswith("epoch")] == [
        f"epoch  {n}/3" for n in (1, 2, 3)
    ]
    # Leave out the lines of the launcher, which may report the death after the program's last line.
    own = [line for line in job.lines if not line.startswith("[")]
    assert own[-1].startswith("test accuracy: 0.")
    job.left_nothing()
