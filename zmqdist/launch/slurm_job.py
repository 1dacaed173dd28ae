"""Submits, follows and cancels one job of Slurm that runs a whole cluster. This code runs on the
host on which the user submits the job.

Rules
    The job runs the command `zmqdist launch` in its batch step, on its first node. In the job
    SLURM_JOB_ID is set. The launcher then starts its roles with srun (slurm.py), and does not
    submit another job.

    This module runs Slurm's programs and does not use Slurm's library. If a program fails, the
    module raises an error with one sentence.

    The job belongs to Slurm and continues when this process ends. Only Ctrl-C and SIGTERM in this
    process cancel it. The job writes its output to a file on a shared file system. This process
    opens the file anew each time it looks for new output, because a network file system shows new
    contents only after an open.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.cluster.config import ClusterConfig
from zmqdist.launch.children import ending_signals

Say = Callable[[str], object]

JOB_ENV: Final = "SLURM_JOB_ID"
COMMAND_S: Final = 60.0
"""Seconds that a program of Slurm may take. The limit is high, because the controller is slow under
load and the program repeats its requests.
"""
LOOK_S: Final = 0.2
"""Seconds between two looks at the job's output."""
ASK_S: Final = 2.0
"""Seconds between two requests to Slurm's controller. The requests are rare, because all users of
the cluster share the controller."""
PATIENCE_S: Final = 120.0
"""Seconds without an answer of the controller after which `JobFollower.run` raises. A restart of
the controller takes less."""
READ_BYTES: Final = 1 << 20
"""Bytes of output that are read at a time. They are bounded, because a job may have written
gigabytes before a user follows the job."""
DRAIN_MARGIN_S: Final = 40
"""Slurm sends SIGTERM to the job this many seconds, plus twice the grace, before the job's time
limit. The margin is needed because Slurm checks time limits only every 30 s."""
SHORT_JOB_S: Final = 300
"""Slurm sends no signal before the time limit to a job whose limit is below this many seconds,
because the signal might arrive at the start of the job."""

_RUNNING: Final = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
)
_TOO_SMALL: Final = "has too few nodes, CPUs or time for it: `sinfo -l` lists what it has"
_NOT_ALLOWED: Final = "does not take this account: `sacctmgr show associations` lists yours"
_NEVER: Final = {
    "PartitionConfig": _TOO_SMALL,
    "PartitionNodeLimit": _TOO_SMALL,
    "PartitionTimeLimit": _TOO_SMALL,
    "BadConstraints": _TOO_SMALL,
    "AccountNotAllowed": _NOT_ALLOWED,
    "InvalidAccount": _NOT_ALLOWED,
    "InvalidQOS": _NOT_ALLOWED,
}
"""The reasons for which a pending job never starts. The value is a phrase about the job's partition
and the command that shows more."""


@dataclass(frozen=True)
class JobState:
    """The state of a job, as Slurm reports it.

    Attributes:
      state: the state, such as "PENDING" or "TIMEOUT".
      reason: why the job waits, such as "Resources", or why it ended.
      exit_code: exit code of the job's script, which is 128 + n if signal n ended the script.
      output: the file with the job's output.
      partition, nodes, time_limit: texts as Slurm writes them. `nodes` is "" before the job starts.
    """

    state: str
    reason: str
    exit_code: int
    output: Path
    partition: str
    nodes: str
    time_limit: str

    @property
    def is_over(self) -> bool:
        return self.state not in _RUNNING


# -- submit ----------------------------------------------------------------------------------------


def submit(config: ClusterConfig, command: Sequence[str], grace_s: float) -> int:
    """Submit a job that runs a command on its first node, and return the number of the job. This
    function does not wait until the job starts.

    Args:
      config: the cluster file. Its section `slurm` has the resources that the job requests.
      command: `zmqdist launch` with its arguments. The command runs in the working directory and
        with the environment of this process.
      grace_s: the grace of the command, in seconds. Slurm sends SIGTERM to the command 2 *
        `grace_s` + DRAIN_MARGIN_S seconds before the time limit, unless the limit is below
        SHORT_JOB_S.

    Raises:
      NotFoundError: this host has no sbatch.
      InvalidArgumentError: Slurm refuses the requested resources.
      UnavailableError: Slurm's controller does not answer.
    """
    # Python writes lines to a file only when its buffer is full. PYTHONUNBUFFERED makes the output
    # visible at once.
    script = f"#!/bin/sh\nexport PYTHONUNBUFFERED=1\nexec {shlex.join(command)}\n"
    process = _run(_sbatch(config, grace_s), input=script)
    if process.returncode != 0:
        raise _refused(process.stderr)
    # the output is "17;cluster" if Slurm has several clusters
    number = process.stdout.strip().partition(";")[0]
    return int(number)


def _sbatch(config: ClusterConfig, grace_s: float) -> list[str]:
    section = config.slurm
    worker = config.jobs.worker
    words = ["sbatch", "--parsable", f"--job-name={config.name}", f"--output={config.name}-%j.out"]
    # The options make a requeued job append to its output file, and let the job continue when one
    # of its nodes is lost.
    words += [
        "--open-mode=append",
        "--no-kill",
    ]
    nodes = section.nodes or 1
    words += [f"--nodes={nodes}", "--ntasks-per-node=1"]
    if worker is None or worker.slots != "auto":
        slots = 1 if worker is None else worker.slots_here()
        workers = 1 if worker is None else worker.most()
        words.append(f"--cpus-per-task={math.ceil(workers / nodes) * slots}")
    else:
        words.append("--exclusive")
    if section.time is None or (_seconds(section.time) or SHORT_JOB_S) >= SHORT_JOB_S:
        words.append(f"--signal=B:TERM@{math.ceil(2 * grace_s) + DRAIN_MARGIN_S}")
    for option in ("partition", "account", "time", "gres"):
        if (value := getattr(section, option)) is not None:
            words.append(f"--{option}={value}")
    return [*words, *section.extra]


def _seconds(time_limit: str) -> int | None:
    """Return a time limit of Slurm in seconds. None means that the text has an unknown form. In
    Slurm "90" means minutes, "1:30" minutes and seconds, and "2-4" days and hours.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # there are no hours: the first number is minutes
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


_REFUSALS: Final = (
    (
        r"invalid partition specified: (?P<what>\S+)|Invalid partition name",
        "Slurm has no partition {what}: write one that `sinfo` lists as slurm.partition",
    ),
    (
        r"Invalid account|Invalid qos",
        (
            "Slurm refuses the account for this partition: write one that `sacctmgr show "
            "associations` lists as slurm.account"
        ),
    ),
    (
        r"Invalid --time specification",
        (
            "slurm.time is no time that Slurm reads: write hours:minutes:seconds in quotes, such as "
            "'01:30:00'"
        ),
    ),
    (
        r"Requested time limit is invalid|time limit",
        "slurm.time is longer than the partition allows: `sinfo` lists its limit",
    ),
    (
        r"Invalid generic resource",
        "Slurm has no such slurm.gres: `sinfo -o '%N %G'` lists what the nodes have",
    ),
    (
        (
            r"Node count specification|node configuration is not available|can not be satisfied|More "
            r"processors requested|nodes are busy"
        ),
        (
            "too few nodes have what the job asks for (nodes, CPUs of a node, slurm.extra): `sinfo -N "
            "-l` lists what they have"
        ),
    ),
    (
        r"unrecognized option '(?P<what>[^']*)'|[Ii]nvalid option|invalid argument",
        "sbatch does not know an option of slurm.extra {what}: `man sbatch` lists them",
    ),
    (
        r"violates accounting/QOS policy|limit",
        "the job exceeds what your account may have: `sacctmgr show qos` lists the limits",
    ),
)
_NO_ANSWER: Final = r"[Uu]nable to contact|configuration source|DNS SRV|Connection refused|timed out|Zero Bytes|Protocol auth"


def _refused(stderr: str) -> errors.OpError:
    """Return an error that explains why sbatch refused the job. `said` is the text that sbatch has
    written to standard error."""
    quoted = _last_line(stderr)
    if re.search(_NO_ANSWER, stderr):
        return errors.UnavailableError(
            f"Slurm's controller does not answer ({quoted}): see whether `sinfo` works here"
        )
    for pattern, sentence in _REFUSALS:
        if (match := re.search(pattern, stderr)) is not None:
            name = match.groupdict().get("what") or ""
            text = " ".join(
                sentence.format(what=repr(name) if name else "").replace(" :", ":").split()
            )
            return errors.InvalidArgumentError(f"{text} ({quoted})")
    return errors.InvalidArgumentError(f"sbatch refuses the job: {quoted}")


# -- follow ----------------------------------------------------------------------------------------


def job_state(number: int) -> JobState:
    """Return the state of a job, as Slurm reports it.

    Raises:
      NotFoundError: Slurm does not know the job, or has forgotten the job, or this host has no
        scontrol.
      UnavailableError: Slurm's controller does not answer.
    """
    process = _run(["scontrol", "show", "job", str(number)])
    if process.returncode != 0:
        if "Invalid job id" in process.stderr:
            raise errors.NotFoundError(
                f"Slurm knows no job {number}. Slurm forgets a job some minutes after its end, "
                f"but `sacct -j {number}` may still list it"
            )
        raise errors.UnavailableError(
            f"Slurm's controller does not answer ({_last_line(process.stderr)}): see whether "
            f"`sinfo` works here"
        )
    return _parsed(process.stdout)


def _parsed(text: str) -> JobState:
    """Return the state of a job. `text` is the output of `scontrol show job`, which has one or more
    `Key=value` on each line."""

    def value(key: str, pattern: str = r"\S+") -> str:
        match = re.search(rf"(?:^|\s){key}=({pattern})", text, re.MULTILINE)
        return "" if match is None or match[1] in ("(null)", "None", "N/A") else match[1]

    code, _, number = (value("ExitCode") or "0:0").partition(":")
    return JobState(
        state=value("JobState"),
        reason=value("Reason"),
        exit_code=128 + int(number) if int(number) else int(code),
        output=Path(value("StdOut", r".*$")),
        partition=value("Partition"),
        nodes=value("NodeList"),
        time_limit=value("TimeLimit"),
    )


@contextlib.contextmanager
def following(say: Say) -> Iterator[JobFollower]:
    """Return a context manager that yields a JobFollower. Inside the context, SIGINT and SIGTERM
    cancel the job.

    Enter the context before the job is submitted, so that Ctrl-C always cancels the job. Enter it
    in the main thread, because only the main thread can handle signals.
    """
    follower = JobFollower(say)
    with ending_signals(follower.signals.append):
        yield follower


class JobFollower:
    """Passes on the output of a job until the job has ended.

    Args:
      say: a function that is called with each line of the job's output, and with a line for each
        change of the job's state.

    Attributes:
      signals: the signals that this process has got. The first one cancels the job.
    """

    def __init__(self, say: Say) -> None:
        self.signals: list[int] = []
        self._say = say
        self._number = 0
        self._read_bytes = 0
        self._rest = b""
        self._reported = ""

    def run(self, number: int, submitted: bool) -> int:
        """Follow a job until it has ended, and return the job's exit code. If the job was cancelled
        because this process got signal n, return 128 + n. Call this method once.

        After the first signal this method waits until the job has ended. After the second signal it
        returns at once.

        Args:
          submitted: whether this process has submitted the job. If so, this method cancels a job
            that can never start.

        Raises:
          NotFoundError, UnavailableError: as `job_state` raises them.
          InvalidArgumentError: Slurm can never start the submitted job, because of the
            configuration of its partition.
        """
        self._number = number
        cancelled = False
        pause = threading.Event()
        state, asked_at = job_state(number), time.monotonic()
        answered_at = asked_at
        while not state.is_over:
            self._pass_on(state.output)
            if self.signals and not cancelled:
                cancelled = True
                self._say(
                    f"[slurm] job {number} is cancelled; a second Ctrl-C does not wait for its end"
                )
                cancel(number)
            elif len(self.signals) > 1:
                self._say(
                    f"[slurm] job {number} is still ending: `squeue -j {number}` lists it until "
                    f"it has"
                )
                return 128 + self.signals[0]
            elif not cancelled:
                self._report(state, submitted)
            pause.wait(LOOK_S)
            if time.monotonic() - asked_at >= ASK_S:
                asked_at = time.monotonic()
                try:
                    state, answered_at = job_state(number), asked_at
                except errors.UnavailableError:
                    # the controller may be restarting, so ask again for a while
                    if asked_at - answered_at > PATIENCE_S:
                        raise
        while self._pass_on(state.output):
            pass
        if self._rest:
            self._say(self._rest.decode(errors="replace"))
        return 128 + self.signals[0] if self.signals else self._exit_code(state)

    def _pass_on(self, output: Path) -> bool:
        """Pass on the lines that the job has written since the last call. Return whether the job
        has written any bytes since then."""
        try:
            with output.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read(READ_BYTES)
        except OSError:  # the job has not started, or this host does not see its file yet
            return False
        self._read_bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._say(line.decode(errors="replace"))
        return bool(data)

    def _report(self, state: JobState, submitted: bool) -> None:
        """Tell the user where the job runs or why it waits, if this has changed. Cancel a submitted
        job that can never start."""
        if state.state == "PENDING":
            if submitted and state.reason in _NEVER:
                cancel(self._number)
                raise errors.InvalidArgumentError(
                    f"Slurm cannot start job {self._number} in partition {state.partition} "
                    f"({state.reason}), "
                    f"which {_NEVER[state.reason]}; the job is cancelled"
                )
            # An empty reason means that Slurm has not considered the job yet.
            where = f"waits: {state.reason}" if state.reason else ""
        elif state.state == "RUNNING":
            where = f"runs on {state.nodes}"
        else:
            where = ""
        if where and where != self._reported:
            self._reported = where
            self._say(f"[slurm] job {self._number} {where}")

    def _exit_code(self, state: JobState) -> int:
        sentence = _ENDS.get(state.state)
        if sentence is not None:
            self._say(f"[slurm] job {self._number} {sentence.format(state=state)}")
            return state.exit_code or 1
        if self._read_bytes == 0 and not state.output.exists():
            self._say(
                f"[slurm] job {self._number} has ended; this host does not see its output, "
                f"{state.output}"
            )
        return state.exit_code


_ENDS: Final = {
    "TIMEOUT": "was ended by its time limit of {state.time_limit}: ask for more as slurm.time",
    "DEADLINE": "was ended by its deadline",
    "OUT_OF_MEMORY": "ran out of memory: ask for more, such as extra: [--mem=16G]",
    "NODE_FAIL": "has lost the node on which its program ran ({state.nodes}): submit it again",
    "BOOT_FAIL": "has lost a node that did not start: submit it again",
    "PREEMPTED": "was ended in favour of another job: submit it again",
    "CANCELLED": "was cancelled",
}


def cancel(number: int) -> None:
    """Cancel a job, without waiting until it has ended. Slurm sends SIGTERM to the processes of the
    job, and SIGKILL after the time KillWait of Slurm's configuration.
    """
    process = _run(["scancel", str(number)])
    if process.returncode != 0 and "Invalid job id" not in process.stderr:
        # an invalid id means that the job has ended
        raise errors.UnavailableError(
            f"job {number} could not be cancelled: {_last_line(process.stderr)}"
        )


def _run(command: Sequence[str], input: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm in a session of its own, so that Ctrl-C does not interrupt the
    program. Raises NotFoundError if the program is missing, and UnavailableError if it takes longer
    than COMMAND_S.
    """
    if shutil.which(command[0]) is None:
        raise errors.NotFoundError(
            f"launcher: slurm needs the program `{command[0]}`, which is not found: run this on a "
            f"host that submits jobs of Slurm"
        )
    try:
        return subprocess.run(
            command,
            input=input,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise errors.UnavailableError(
            f"Slurm's controller has not answered `{command[0]}` for {COMMAND_S:g} s: see whether "
            f"`sinfo` works here"
        ) from None


def _last_line(stderr: str) -> str:
    lines = [
        re.sub(r"^(sbatch|scontrol|scancel): (error: |fatal: )?", "", line)
        for line in stderr.splitlines()
        if line.strip()
    ]
    usage = [line for line in lines if not line.startswith("Try ")]
    return usage[-1].strip() if usage else "it said nothing"
