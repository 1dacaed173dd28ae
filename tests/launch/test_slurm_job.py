"""A job of Slurm, with scripts in place of Slurm's commands, which print what Slurm 22.05 printed.
For a real Slurm: tests/engines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from zmqdist import errors
from zmqdist.cluster import ClusterConfig
from zmqdist.launch import slurm_job
from zmqdist.launch.launcher import Launch
from zmqdist.launch.slurm import allocated_cores, explain, slurm_hosts, srun_command
from zmqdist.launch.slurm_job import following, job_state, submit

SHOWN = """\
JobId=17 JobName=digits
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901758 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:01:27 TimeLimit=00:01:00 TimeMin=N/A
   Partition=short AllocNode:Sid=login:0
   ReqNodeList=n1 ExcNodeList=(null)
   NodeList=n[1-2]
   BatchHost=n1
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Command=(null)
   StdErr={folder}/out file
   StdIn=/dev/null
   StdOut={folder}/out file
   Power=

"""


class FakeSlurm:
    """Scripts in a folder that is the first one in PATH. Each writes its arguments to a file with
    its name."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def answers(self, program: str, out: str = "", error: str = "", code: int = 0) -> None:
        """Make the script of a program: it prints this text and ends with `code`."""
        (self.folder / f"{program}.answer").write_text(out)
        (self.folder / f"{program}.error").write_text(error)
        here = f"{self.folder}/{program}"
        script = f'#!/bin/sh\necho "$@" >>{here}.called\ncat >{here}.input\ncat {here}.answer\ncat {here}.error >&2\nexit {code}\n'
        (self.folder / f"{program}.new").write_text(script)
        (self.folder / f"{program}.new").chmod(0o755)
        (self.folder / f"{program}.new").rename(self.folder / program)

    def job(self, state: str, reason: str = "None", code: str = "0:0") -> None:
        """Have scontrol print this description of job 17."""
        self.answers(
            "scontrol", SHOWN.format(state=state, reason=reason, code=code, folder=self.folder)
        )

    def writes(self, text: str) -> None:
        """Write this text as the output of the job."""
        with (self.folder / "out file").open("a") as file:
            file.write(text)

    def called(self, program: str) -> str:
        path = self.folder / f"{program}.called"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(slurm_job, "ASK_S", 0.05)
    monkeypatch.setattr(slurm_job, "LOOK_S", 0.01)
    fake = FakeSlurm(tmp_path, monkeypatch)
    fake.answers("scancel")
    return fake


def config(
    section: dict[str, object] | None = None, worker: dict[str, object] | None = None
) -> ClusterConfig:
    return ClusterConfig.from_dict(
        {
            "name": "digits",
            "launcher": "slurm",
            "jobs": {"worker": worker or {"count": 5, "slots": 2}},
            "slurm": section or {},
            "program": "true",
        }
    )


def words(slurm: FakeSlurm, **sections: dict[str, object]) -> list[str]:
    """Return the arguments that sbatch gets."""
    slurm.answers("sbatch", "17\n")
    assert submit(config(**sections), ["true"], 10.0) == 17  # type: ignore[arg-type]
    return slurm.called("sbatch").split()


# -- submit ----------------------------------------------------------------------------------------


def test_keys_of_file_are_sbatch_options(
    slurm: FakeSlurm,
) -> None:
    section = {
        "nodes": 2,
        "partition": "short",
        "account": "physics",
        "time": "01:30:00",
        "gres": "gpu:2",
        "extra": ["--mem=8G", "--signal=B:TERM@90"],
    }
    assert words(slurm, section=section) == [
        "--parsable",
        "--job-name=digits",
        "--output=digits-%j.out",
        "--open-mode=append",
        "--no-kill",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=6",  # three of five workers on a node, with two slots each
        "--signal=B:TERM@60",  # twice the grace of 10 s, and 40 s
        "--partition=short",
        "--account=physics",
        "--time=01:30:00",
        "--gres=gpu:2",
        "--mem=8G",
        "--signal=B:TERM@90",
    ]


def test_auto_slots_get_whole_nodes(slurm: FakeSlurm) -> None:
    output = words(slurm, worker={"count": 2, "slots": "auto"})
    assert "--exclusive" in output
    assert not any("cpus" in word for word in output)


@pytest.mark.parametrize(
    ("time", "message"),
    [
        ("1", False),
        ("4:59", False),
        ("5", True),
        ("05:00", True),
        ("0:10:00", True),
        ("1-0", True),
        ("1-00:30", True),
    ],
)
def test_long_job_gets_early_signal(slurm: FakeSlurm, time: str, message: bool) -> None:
    assert (
        any(word.startswith("--signal") for word in words(slurm, section={"time": time})) is message
    )


def test_script_quotes_words_of_command(slurm: FakeSlurm) -> None:
    slurm.answers("sbatch", "17;cluster\n")
    assert submit(config(), ["zmqdist", "launch", "a file", "--", "$HOME"], 10.0) == 17
    script = (slurm.folder / "sbatch.input").read_text()
    assert (
        script == "#!/bin/sh\nexport PYTHONUNBUFFERED=1\nexec zmqdist launch 'a file' -- '$HOME'\n"
    )


@pytest.mark.parametrize(
    ("output", "kind", "expected"),
    [
        (
            (
                "sbatch: error: invalid partition specified: nope\n"
                "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
            ),
            errors.InvalidArgumentError,
            (
                "Slurm has no partition 'nope': write one that `sinfo` lists as slurm.partition "
                "(Batch job submission failed: Invalid partition name specified)"
            ),
        ),
        (
            "sbatch: error: Invalid generic resource (gres) specification\n",
            errors.InvalidArgumentError,
            (
                "Slurm has no such slurm.gres: `sinfo -o '%N %G'` lists what the nodes have (Invalid "
                "generic resource (gres) specification)"
            ),
        ),
        (
            "sbatch: error: Invalid --time specification\n",
            errors.InvalidArgumentError,
            (
                "slurm.time is no time that Slurm reads: write hours:minutes:seconds in quotes, "
                "such as '01:30:00' "
                "(Invalid --time specification)"
            ),
        ),
        (
            (
                "sbatch: error: Memory specification can not be satisfied\n"
                "sbatch: error: Batch job submission failed: Requested node configuration is not "
                "available\n"
            ),
            errors.InvalidArgumentError,
            (
                "too few nodes have what the job asks for (nodes, CPUs of a node, slurm.extra): "
                "`sinfo -N -l` lists what they have "
                "(Batch job submission failed: Requested node configuration is not available)"
            ),
        ),
        (
            "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information\n",
            errors.InvalidArgumentError,
            (
                "sbatch does not know an option of slurm.extra '--bogus': `man sbatch` lists them "
                "(unrecognized option '--bogus')"
            ),
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Invalid account or account/partition "
                "combination specified\n"
            ),
            errors.InvalidArgumentError,
            (
                "Slurm refuses the account for this partition: write one that `sacctmgr show "
                "associations` lists as slurm.account "
                "(Batch job submission failed: Invalid account or account/partition combination "
                "specified)"
            ),
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Unable to contact slurm controller "
                "(connect failure)\n"
            ),
            errors.UnavailableError,
            (
                "Slurm's controller does not answer (Batch job submission failed: Unable to "
                "contact slurm controller (connect failure)): "
                "see whether `sinfo` works here"
            ),
        ),
        (
            "sbatch: fatal: something new\n",
            errors.InvalidArgumentError,
            "sbatch refuses the job: something new",
        ),
    ],
)
def test_sbatch_refusal_has_remedy(
    slurm: FakeSlurm, output: str, kind: type[errors.OpError], expected: str
) -> None:
    slurm.answers("sbatch", error=output, code=1)
    with pytest.raises(kind) as caught:
        submit(config(), ["true"], 10.0)
    assert str(caught.value) == expected


def test_missing_slurm_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        errors.NotFoundError,
        match=r"needs the program `sbatch`, which is not found: run this on a host that",
    ):
        submit(config(), ["true"], 10.0)
    with pytest.raises(
        errors.NotFoundError,
        match=r"needs the program `srun`, which is not found: load Slurm's module",
    ):
        slurm_hosts(60.0)


# -- follow ----------------------------------------------------------------------------------------


def test_follower_prints_lines_and_exit_code(
    slurm: FakeSlurm,
) -> None:
    slurm.job("RUNNING")
    slurm.writes("one\ntw")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line == "one":
            slurm.writes("o\nlast")
            slurm.job("FAILED", "NonZeroExitCode", "7:0")

    with following(say) as follower:
        assert follower.run(17, submitted=True) == 7
    assert lines == ["one", "[slurm] job 17 runs on n[1-2]", "two", "last"]


@pytest.mark.parametrize(
    ("state", "code", "exit_code", "expected"),
    [
        ("COMPLETED", "0:0", 0, None),
        ("FAILED", "0:9", 137, None),
        (
            "TIMEOUT",
            "0:9",
            137,
            "was ended by its time limit of 00:01:00: ask for more as slurm.time",
        ),
        (
            "OUT_OF_MEMORY",
            "0:125",
            253,
            "ran out of memory: ask for more, such as extra: [--mem=16G]",
        ),
        (
            "NODE_FAIL",
            "0:0",
            1,
            "has lost the node on which its program ran (n[1-2]): submit it again",
        ),
        ("PREEMPTED", "0:9", 137, "was ended in favour of another job: submit it again"),
        ("CANCELLED", "0:15", 143, "was cancelled"),
    ],
)
def test_job_ended_by_slurm_is_explained(
    slurm: FakeSlurm, state: str, code: str, exit_code: int, expected: str | None
) -> None:
    slurm.writes("")
    slurm.job(state, code=code)
    lines: list[str] = []
    with following(lines.append) as follower:
        assert follower.run(17, submitted=True) == exit_code
    assert lines == ([] if expected is None else [f"[slurm] job 17 {expected}"])


def test_waiting_job_prints_reason_once(slurm: FakeSlurm) -> None:
    slurm.job("PENDING", "Resources")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        threading.Timer(0.3, slurm.job, ["COMPLETED"]).start()

    slurm.writes("")
    with following(say) as follower:
        assert follower.run(17, submitted=True) == 0
    assert lines == ["[slurm] job 17 waits: Resources"]


def test_unstartable_job_is_cancelled(slurm: FakeSlurm) -> None:
    slurm.job("PENDING", "PartitionConfig")
    with (
        following(lambda line: None) as follower,
        pytest.raises(
            errors.InvalidArgumentError,
            match=r"cannot start job 17 in partition short \(PartitionConfig\)",
        ),
    ):
        follower.run(17, submitted=True)
    assert slurm.called("scancel") == "17"


def test_foreign_waiting_job_is_not_cancelled(
    slurm: FakeSlurm,
) -> None:
    slurm.job("PENDING", "PartitionTimeLimit")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        slurm.job("COMPLETED")

    slurm.writes("")
    with following(say) as follower:
        assert follower.run(17, submitted=False) == 0
    assert lines == ["[slurm] job 17 waits: PartitionTimeLimit"]
    assert not slurm.called("scancel")


def test_long_output_printed_to_its_end(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "READ_BYTES", 10)
    slurm.writes("".join(f"line {number}\n" for number in range(50)))
    slurm.job("COMPLETED")
    lines: list[str] = []
    with following(lines.append) as follower:
        assert follower.run(17, submitted=False) == 0
    assert lines == [f"line {number}" for number in range(50)]


def test_ctrl_c_cancels_the_job_and_waits_for_its_end(slurm: FakeSlurm) -> None:
    slurm.job("RUNNING")
    slurm.writes("busy\n")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if "runs on" in line:
            signal.raise_signal(signal.SIGINT)
        if "is cancelled" in line:
            slurm.writes("the last line\n")
            slurm.job("CANCELLED", code="0:15")

    before = signal.getsignal(signal.SIGINT)
    with following(say) as follower:
        assert follower.run(17, submitted=True) == 130
    assert lines[2:] == [
        "[slurm] job 17 is cancelled; a second Ctrl-C does not wait for its end",
        "the last line",
    ]
    assert slurm.called("scancel") == "17"
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_returns_at_once(slurm: FakeSlurm) -> None:
    slurm.job("COMPLETING")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        signal.raise_signal(signal.SIGINT)

    with following(say) as follower:
        # the launcher does not know the job yet; it cancels the job later
        signal.raise_signal(signal.SIGINT)
        assert follower.run(17, submitted=True) == 130
    assert lines[-1] == "[slurm] job 17 is still ending: `squeue -j 17` lists it until it has"


def test_follower_survives_controller_restart(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Callable[[], None]] = [
        lambda: slurm.answers(
            "scontrol", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1
        ),
        lambda: slurm.job("COMPLETED"),
    ]
    original = slurm_job.job_state

    def ask(number: int) -> slurm_job.JobState:
        try:
            return original(number)
        finally:
            if answers:
                answers.pop(0)()

    monkeypatch.setattr(slurm_job, "job_state", ask)
    slurm.writes("")
    slurm.job("RUNNING")
    with following(lambda line: None) as follower:
        assert follower.run(17, submitted=True) == 0
    assert not answers


def test_unknown_job_is_an_error(slurm: FakeSlurm) -> None:
    slurm.answers("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    with pytest.raises(
        errors.NotFoundError,
        match=r"knows no job 17. Slurm forgets a job some minutes after its end, but `sacct -j 17`",
    ):
        job_state(17)


def test_invisible_output_file_is_reported(slurm: FakeSlurm) -> None:
    slurm.job("COMPLETED")
    lines: list[str] = []
    with following(lines.append) as follower:
        assert follower.run(17, submitted=True) == 0
    assert lines == [
        f"[slurm] job 17 has ended; this host does not see its output, {slurm.folder}/out file"
    ]


def test_file_checked_before_submission(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    Launch(config(), (), print).check()


# -- in an allocation ------------------------------------------------------------------------------


def test_allocation_nodes_are_hosts(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.answers("srun")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[09-10],m1")
    assert [(host.name, host.slots) for host in slurm_hosts(60.0)] == [
        ("n09", None),
        ("n10", None),
        ("m1", None),
    ]
    assert "--nodelist=n09" in srun_command("n09", ["python"])


@pytest.mark.parametrize("code", [None, ["program.py"]])
def test_nodes_get_code_only_where_the_file_names_it(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, code: list[str] | None
) -> None:
    """Nodes share the folder of the job, so a folder with more than can be sent starts
    nevertheless."""
    monkeypatch.chdir(slurm.folder)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr("zmqdist.launch.code_bundle.CODE_FILES_MAX", 0)
    (slurm.folder / "srun").write_text("#!/bin/sh\necho no agent here >&2\nexit 1\n")
    (slurm.folder / "srun").chmod(0o755)
    (slurm.folder / "program.py").touch()
    file = msgspec.structs.replace(config(), program="python program.py", code=code)
    refusal = "n1: .*no agent here" if code is None else "too much for code that is sent to hosts"
    with pytest.raises(errors.OpError, match=refusal):
        Launch(file, (), print).run()


def test_outside_of_an_allocation_the_error_says_so(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answers("srun")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(
        errors.FailedPreconditionError,
        match=r"SLURM_JOB_NODELIST is not set, so this is no allocation of Slurm",
    ):
        slurm_hosts(60.0)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[")
    with pytest.raises(
        errors.FailedPreconditionError, match=r"SLURM_JOB_NODELIST: 'n\[' is no host list"
    ):
        slurm_hosts(60.0)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        (
            (
                "slurmstepd-n2: error: *** STEP 7.0 ON n2 CANCELLED AT 2026-11-25T07:48:04 DUE TO "
                "TIME LIMIT ***"
            ),
            "the time limit of the job is over: ask for more as slurm.time",
        ),
        (
            "slurmstepd-n2: error: *** STEP 7.0 ON n2 CANCELLED AT 2026-11-25T07:48:04 ***",
            "its step was cancelled",
        ),
        (
            "srun: error: Node failure on n2",
            "its node does not answer any more (Node failure): `sinfo -R` says why",
        ),
        (
            (
                "slurmstepd-n2: error: execve(): /opt/py/bin/python: No such file or directory\nsrun: "
                "error: n2: task 0: Exited"
            ),
            (
                "its node does not see this Python (execve(): /opt/py/bin/python: No such file or "
                "directory): "
                "put the environment on a file system that all nodes mount"
            ),
        ),
        (
            "slurmstepd-n2: error: Detected 1 oom-kill event(s) in StepId=7.0",
            (
                "Slurm ended its processes because the job ran out of memory: ask for more, such as "
                "extra: [--mem=16G]"
            ),
        ),
        ("srun: error: something new", "srun ended (exit code 1): something new"),
        ("", "srun ended (exit code 1): it said nothing"),
    ],
)
def test_srun_end_is_one_phrase(notes: str, expected: str) -> None:
    assert explain(1, notes) == expected


@pytest.mark.parametrize(
    ("text", "cores"), [("4", 4), ("4,2(x3)", 10), ("16(x2)", 32), ("", None), ("many", None)]
)
def test_allocation_cores_of_all_nodes(
    text: str, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", text)
    assert allocated_cores() == cores
