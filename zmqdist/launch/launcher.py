"""Runs a whole cluster file: `Launch` starts every job, runs the program, and stops all jobs when
the program has ended.

The dispatcher runs in this process. Workers and parameter servers run as child processes of this
process or, through host agents, on other hosts (tasks.py, hosts.py). The program, which is
the chief, is the only child process that writes to the terminal directly. `Launch` passes on the
output of the other child processes, with a prefix. The exit code of `Launch` is that of the
program.

The evaluator is another child process. When the program has ended, the evaluator has the grace to
notice that the training is over and to end by itself. Then `Launch` stops it. A crashed evaluator
is not restarted.

If the program's command begins with `python` or `python3`, the Python of this process runs the
program. The program and the workers exchange pickled functions and values, and therefore need the
same Python with the same packages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.addresses import VARIABLE as PORTS_ENV
from zmqdist.addresses import advertised_address, is_loopback, is_wildcard
from zmqdist.background import in_background
from zmqdist.blas_threads import thread_variables
from zmqdist.child_command import path_variable
from zmqdist.cluster.check import split_command
from zmqdist.cluster.config import ClusterConfig
from zmqdist.cluster.environment import CONFIG_ENV, TF_CONFIG_ENV, variable
from zmqdist.cluster.file_sections import (
    DispatcherJob,
    RuntimeConfig,
    ServingJob,
    SingleJob,
    WorkerJob,
)
from zmqdist.launch.children import (
    Child,
    Children,
    check_descriptors,
    end_with_parent,
    ending_signals,
)
from zmqdist.launch.code_bundle import CodeBundle, bundle_of, check_paths
from zmqdist.launch.connection import serve_dashboard
from zmqdist.launch.elastic_workers import ElasticWorkers, scaling_problem
from zmqdist.launch.elasticity_machine import Elasticity, SizeBounds
from zmqdist.launch.folders import RunFolder
from zmqdist.launch.hosts import AgentPool, Hosts, agent_hosts
from zmqdist.launch.ports import Reserved
from zmqdist.launch.role_files import JoiningChildren, RoleFiles
from zmqdist.launch.roles import TaskConfig
from zmqdist.launch.slurm import allocated_cores
from zmqdist.launch.tasks import MakeLauncher, RunningRole, Tasks
from zmqdist.limits import GRACE_S
from zmqdist.process import zygote_client
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport import keys
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.own_address import bindable

if TYPE_CHECKING:
    pass

Say = Callable[[str], object]

LOOPBACK = "127.0.0.1"
DISPATCHER: Final = "zmqdist.servers.dispatch_server"
"""The module of the dispatcher. It is imported late, because its import takes a quarter of a
second."""


class Launch:
    """One run of a cluster file. Call `run` once.

    Args:
      config: the loaded cluster file. This class fills in its `runtime`.
      arguments: words to add to the program's command line.
      say: a function that is called with each line that a worker, ps or evaluator prints, after a
        prefix with the name of the role, and with a line when such a process ends.
      grace_s: seconds that the program and the tasks may take to stop before they are killed.
      dashboard: whether to serve the dashboard on this host, and to say its link.

    Raises:
      OpError: `run` raises it if `check` refuses the file, a host cannot run roles, the dispatcher
        cannot be started, or the port of a ps is in use.
    """

    def __init__(
        self,
        config: ClusterConfig,
        arguments: Sequence[str],
        say: Say,
        grace_s: float = GRACE_S,
        dashboard: bool = False,
    ) -> None:
        worker = config.jobs.worker or WorkerJob(count=1)
        self._config = msgspec.structs.replace(
            config, jobs=msgspec.structs.replace(config.jobs, worker=worker)
        )
        self._workers = worker
        self._dispatcher_section = config.jobs.dispatcher or DispatcherJob()
        self._command = [*_with_this_python(config.command), *arguments]
        self._say = say
        self._grace_s = grace_s
        self._dashboard = dashboard
        self._program_over = False
        self._signals: list[int] = []
        self._shares_terminal = False
        """Whether the terminal sends Ctrl-C to the program as well as to this process."""
        self._program: subprocess.Popen[bytes] | None = None
        self._pool: AgentPool | None = None
        """The host agents. None means that the roles are child processes of this process."""
        self._elastic: ElasticWorkers | None = None
        # The lock is reentrant, because a signal handler may run in the thread that has the lock.
        self._lock = threading.RLock()

    def run(self) -> int:
        """Start all jobs, run the program to its end, and stop all jobs.

        Return the program's exit code, which is 128 + n if signal n ended the program.
        """
        self.check()
        hosts = agent_hosts(self._config)
        if hosts is None:
            ps = self._config.jobs.ps
            check_descriptors(
                "zmqdist launch", self._workers.most() + (0 if ps is None else len(ps.indices()))
            )
            if self._workers.host is not None:
                # Fail now if workers cannot bind this address. Otherwise they would fail and be
                # restarted again and again.
                bindable(self._workers.host)
            # start the zygote first, so that its imports run while this process starts the
            # dispatcher
            environment = {**os.environ, **self._thread_variables(), **self._workers.env}
            zygote_client.prepare(
                "zmqdist.launch.roles", "-1", "WorkerConfig", environment=environment
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(ending_signals(self._signalled))
            if self._config.ports is not None:
                # Servers of this process and of its child processes take free ports from this range.
                stack.enter_context(variable(PORTS_ENV, self._config.ports))
            run_folder = RunFolder()
            stack.callback(run_folder.close)
            folder = run_folder.path
            if hosts is not None:
                bundle = self._code()
                # The dispatcher is imported in a thread while the agents start.
                in_background("zmqdist-imports", importlib.import_module, DISPATCHER)
                try:
                    self._pool = AgentPool(hosts, self._say, cancelled=lambda: bool(self._signals))
                except errors.CancelledError:
                    return 128 + self._signals[-1]
                stack.callback(self._pool.close)
                if bundle is not None:
                    self._pool.send_code(bundle)
            credentials = self._credentials(folder)
            # Import the dispatcher only now, so that the zygote or the agents start first.
            from zmqdist.servers.dispatch_server import DispatchServer, report_gone, serve_scaling

            dispatcher = DispatchServer(self._dispatcher_config(credentials))
            self._dispatcher = stack.enter_context(dispatcher)
            if self._dashboard:
                serve_dashboard(self._dispatcher.address, credentials, self._say, stack)
            self._reserve(stack)
            cluster = self._write_config(folder / "cluster.yaml", credentials)
            self._variables = {**credentials.variables(), CONFIG_ENV: str(folder / "cluster.yaml")}
            if self._config.ports is not None:
                self._variables[PORTS_ENV] = self._config.ports
            launcher = self._launcher(cluster, credentials, folder)
            tasks = Tasks(
                self._worker_exited, partial(report_gone, self._dispatcher), self._say, launcher
            )
            stack.callback(tasks.close, self._grace_s)
            self._elastic = ElasticWorkers(
                Elasticity(
                    SizeBounds(self._workers.min, self._workers.max, self._workers.idle_s),
                    self._workers.indices(),
                ),
                self._dispatcher,
                tasks,
                lambda index: self._start_worker(tasks, credentials, index),
                lambda: scaling_problem(
                    {} if (ps := self._config.jobs.ps) is None else ps.addresses(), credentials
                ),
            )
            stack.callback(self._elastic.stop)
            self._report_room()
            for index in self._workers.indices():
                self._start_worker(tasks, credentials, index)
            serve_scaling(self._dispatcher, self._elastic)
            self._start_ps(tasks, credentials)
            evaluator = self._start_evaluator(stack)
            code = self._run_program()
            if evaluator is not None:
                self._wait_for_evaluator(evaluator)
            return code

    # -- before ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an error if the cluster file cannot be started on this host. The method binds no
        port and creates no file, so it does not notice a port in use.

        Raises:
          NotFoundError: a program or a path of `code:` that the file names, or a program that its
            launcher needs, is missing.
          InvalidArgumentError: entries of the file contradict each other.
          FailedPreconditionError: a key is missing in the key folder that the file names, or cannot
            be used.
          UnimplementedError: the launcher is kubernetes.
        """
        for key, command in (
            ("program", self._command),
            ("jobs.evaluator.program", self._evaluator_command()),
        ):
            if command and shutil.which(command[0]) is None:
                raise errors.NotFoundError(
                    f"{key}: {command[0]!r} is not found, or may not be executed"
                )
        check_paths(self._config.code or ())
        if self._config.launcher != "slurm":  # outside of a job the hosts of Slurm are not known
            agent_hosts(self._config)
        self._dispatcher_config(Credentials())
        if self._dashboard:
            from zmqdist.observe.dashboard.server import check_installed

            check_installed()
        folder = self._config.security.keys
        if folder is not None:
            keys.load_server_public(folder)
            keys.load_authorized(folder)
            for role in ("server", "worker", "submit"):
                keys.load_role(folder, role)

    def _credentials(self, folder: Path) -> Credentials:
        security = self._config.security
        host, _ = split(self._dispatcher_section.address)
        if security.keys is not None:
            return Credentials(keys_dir=str(Path(security.keys).absolute()))
        on_hosts = self._pool is not None
        if security.curve is True or (
            security.curve == "auto" and (on_hosts or not is_loopback(host))
        ):
            keys.keygen(folder / "keys")
            return Credentials(keys_dir=str(folder / "keys"))
        keys.create(folder / "token")
        return Credentials(token_file=str(folder / "token"))

    def _dispatcher_config(self, credentials: Credentials) -> DispatcherConfig:
        section = self._dispatcher_section
        host, port = split(section.address)
        if self._pool is not None and is_loopback(host):
            host = self._pool.own_address()
        return DispatcherConfig(
            port=port,
            host=host,
            cancel_grace_s=self._workers.cancel_grace_s,
            token_file=credentials.token_file,
            keys_dir=credentials.keys_dir,
            **section.settings(),
        )

    def _write_config(self, path: Path, credentials: Credentials) -> ClusterConfig:
        """Write the cluster file for the program and the tasks, with the section `runtime`, which
        names the running dispatcher. Return the config that was written.
        """
        runtime = RuntimeConfig(
            dispatcher=self._dispatcher.target,
            token_file=credentials.token_file,
            keys_dir=credentials.keys_dir,
        )
        cluster = msgspec.structs.replace(self._config, runtime=runtime)
        path.write_text(cluster.to_yaml())
        path.chmod(0o600)
        return cluster

    def _launcher(
        self, cluster: ClusterConfig, credentials: Credentials, folder: Path
    ) -> MakeLauncher:
        """Return the function with which `Tasks` makes the launcher of the workers and ps."""
        if credentials.keys_dir is None:
            return Children
        dispatcher = self._dispatcher
        files = RoleFiles(
            cluster, lambda name, address: dispatcher.open_join(name, address=address)
        )
        pool = self._pool
        if pool is None:
            return lambda on_exit: JoiningChildren(on_exit, files, folder)
        return lambda on_exit: Hosts(pool, on_exit, self._say, files, self._report_room)

    def _reserve(self, stack: contextlib.ExitStack) -> None:
        """Reserve the ports of the parameter servers and put their addresses into the config."""
        section = self._config.jobs.ps
        if section is not None:
            tasks = (
                self._reserve_here(section, stack)
                if self._pool is None
                else self._reserve_there(section, self._pool)
            )
            section = msgspec.structs.replace(section, count=None, tasks=tasks)
            jobs = msgspec.structs.replace(self._config.jobs, ps=section)
            self._config = msgspec.structs.replace(self._config, jobs=jobs)

    def _reserve_here(self, section: ServingJob, stack: contextlib.ExitStack) -> dict[int, str]:
        host, _ = split(self._dispatcher_section.address)
        host = LOOPBACK if is_wildcard(host) else host
        tasks = {}
        for index in section.indices():
            fixed = section.addresses().get(index)
            written, number = split(fixed) if fixed is not None else (host, 0)
            port = Reserved(section.host or written, number)
            stack.callback(port.close)
            tasks[index] = fixed or _advertised(section, port.address)
        return tasks

    def _thread_variables(self) -> dict[str, str]:
        """Return the environment variables that limit the threads of BLAS in workers and ps on this
        host. Workers and ps have the same variables, so that one zygote can fork all of them.
        """
        slots = self._workers.most() * self._workers.slots_here()
        return thread_variables(
            self._workers.threads_per_slot, slots, {**os.environ, **self._workers.env}
        )

    def _reserve_there(self, section: ServingJob, pool: AgentPool) -> dict[int, str]:
        # Workers get places before ps, so that the workers spread evenly over the hosts.
        for index in self._workers.indices():
            pool.slots.assign(f"worker:{index}")
        ports = self._config.ports or ""
        return {
            index: _advertised(
                section, pool.reserve(f"ps:{index}", interface=section.host, ports=ports)
            )
            for index in section.indices()
        }

    def _environment_of(self, job: str, index: int) -> dict[str, str]:
        """Return the environment variables that a task has in addition to those of its host. `env`
        of the cluster file overrides all others.
        """
        tf_config = {TF_CONFIG_ENV: self._tf_config(job, index)}
        # With host agents leave out the thread variables, because each agent adds those of its own
        # host.
        threads = self._thread_variables() if self._pool is None else {}
        own = self._config.jobs.task_jobs()[job].env
        return {**self._variables, **self._importable(), **tf_config, **threads, **own}

    def _tf_config(self, job: str, index: int) -> str:
        """Return the TF_CONFIG of a task. The index of a worker may exceed the `count` of the file,
        because workers can be added."""
        config, worker = self._config, self._config.jobs.worker
        if job == "worker" and worker is not None and index not in worker.indices():
            more = msgspec.structs.replace(worker, count=index + 1)
            config = msgspec.structs.replace(
                config, jobs=msgspec.structs.replace(config.jobs, worker=more)
            )
        return config.tf_config(job, index)

    def _room(self) -> tuple[int | None, str]:
        """Return `room` and `room_reason` of SizeBounds: for how many workers the hosts that are
        not lost have slots, and why no more."""
        section, pool = self._workers, self._pool
        count, ps = len(section.indices()), self._config.jobs.ps
        if section.tasks is not None:
            return count, f"jobs.worker.tasks has the addresses of {count}"
        if pool is not None and (slots := pool.slots.room) is not None:
            names = [] if ps is None else [f"ps:{index}" for index in ps.indices()]
            room = max(0, slots - sum(not pool.lost_port_host(name) for name in names))
            left = " that are left" if len(pool.slots.hosts) < len(pool.links) else ""
            return (
                room,
                (
                    f"the hosts of launcher: {self._config.launcher}{left} have slots for {room} "
                    f"workers"
                ),
            )
        if self._config.launcher == "slurm" and (cores := allocated_cores()) is not None:
            room = max(count, cores // (1 if section.slots == "auto" else section.slots))
            return (
                room,
                f"the allocation of Slurm has {cores} cores, which are slots for {room} workers",
            )
        return None, ""

    def _start_worker(self, tasks: Tasks, credentials: Credentials, index: int) -> None:
        section = self._workers
        address = section.addresses().get(index)
        host, port = (None, 0) if address is None else split(address)
        config = WorkerConfig(
            self._dispatcher.address if self._pool is None else self._dispatcher.target,
            worker_address=section.advertised_at(index),
            port=port,
            host=section.host or host,
            index=index,
            slots=section.slots_here(),
            resources=section.resources,
            processes=True,
            workers_on_host=1
            if self._pool is None
            else -(-section.most() // len(self._pool.links)),
            token_file=credentials.token_file,
            keys_dir=credentials.keys_dir,
            **section.settings(),
        )
        tasks.start(config, self._environment_of("worker", index), section.restarts)

    def _start_ps(self, tasks: Tasks, credentials: Credentials) -> None:
        section = self._config.jobs.ps
        if section is None:
            return
        for index in section.indices():
            config = TaskConfig(
                {"ps": section.addresses()},
                "ps",
                index,
                credentials.token_file,
                credentials.keys_dir,
                bind_host=section.host,
            )
            tasks.start(config, self._environment_of("ps", index), section.restarts)

    def _evaluator_command(self) -> list[str]:
        """Return the evaluator's command. [] means that the file has no evaluator."""
        section = self._config.jobs.evaluator
        if section is None:
            return []
        return (
            self._command
            if section.program is None
            else _with_this_python(split_command(section.program))
        )

    def _start_evaluator(self, stack: contextlib.ExitStack) -> Child | None:
        """Start the evaluator without the environment variable CONFIG_ENV, which names the running
        cluster. Return None if the file has no evaluator.

        The evaluator often runs the training program itself. If it had CONFIG_ENV and its program
        did not check which task it is, the evaluator would train a second time.
        """
        section = self._config.jobs.evaluator
        if section is None:
            return None
        (index,) = section.indices()
        tf_config = {TF_CONFIG_ENV: self._config.tf_config("evaluator", index)}
        environment = {name: value for name, value in os.environ.items() if name != CONFIG_ENV}
        children = Children(self._evaluator_exited, whole_groups=True)
        stack.callback(children.close, self._grace_s)
        prefix = f"[evaluator-{index}]"
        return children.start_program(
            f"evaluator:{index}",
            self._evaluator_command(),
            {**environment, **tf_config, **section.env},
            lambda line: self._say(f"{prefix} {line}"),
        )

    def _script(self) -> str | None:
        """Return the path of the program's script. None means that the program's command has no
        script."""
        return next(
            (word for word in self._command[1:] if word.endswith(".py") and os.path.isfile(word)),
            None,
        )

    def _importable(self) -> dict[str, str]:
        """Return the variable that puts the folder of the program that Python puts on the program's
        module path on that of workers and ps, too. An agent that has received code replaces the
        variable.
        """
        script = self._script()
        if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH, which the program inherits
            return path_variable([])
        if {"-m", "-c"}.intersection(
            self._command[: None if script is None else self._command.index(script)]
        ):
            return path_variable([os.getcwd()])
        return path_variable([] if script is None else [str(Path(script).resolve().parent)])

    def _code(self) -> CodeBundle | None:
        """Return the code for hosts that do not share this file system: `code` of the file, or else
        the folder of the script. None means that no code has to be sent.
        """
        script, paths = self._script(), self._config.code
        if paths is None:
            # the nodes of Slurm share the folder of the job
            no_code = script is None or self._config.launcher == "slurm"
            paths = [] if no_code else [os.path.dirname(script or "") or "."]
        return bundle_of(paths, script) if paths else None

    # -- while it runs -----------------------------------------------------------------------------

    def _run_program(self) -> int:
        chief = self._config.jobs.chief or SingleJob()
        (index,) = chief.indices()
        tf_config = {TF_CONFIG_ENV: self._config.tf_config("chief", index)}
        environment = {**os.environ, **self._variables, **tf_config, **chief.env}
        with self._lock:
            if self._signals:
                return 128 + self._signals[-1]
            self._shares_terminal = _in_foreground()
            prepare = end_with_parent if self._shares_terminal else _end_with_parent_apart
            self._program = subprocess.Popen(self._command, env=environment, preexec_fn=prepare)
            if self._signals and not self._by_terminal(self._signals[-1]):
                # The signal arrived while the program was being started.
                self._program.send_signal(self._signals[-1])
        code = self._wait_for_program()
        return 128 - code if code < 0 else code

    def _wait_for_program(self) -> int:
        """Wait until the program has ended, and return its exit code. After a signal, kill the
        program when the grace is over."""
        assert self._program is not None
        killed_at: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._program.wait(0.2)
            if self._signals:
                killed_at = killed_at or time.monotonic() + self._grace_s
                if time.monotonic() >= killed_at:
                    self._program.kill()

    def _signalled(self, number: int) -> None:
        """Pass the first signal on to the program, and kill the program on a later signal. If the
        terminal sends the signal to the program itself, do neither.
        """
        with self._lock:
            first = not self._signals
            self._signals.append(number)
            if self._program is None or self._program.poll() is not None:
                return
            if not self._by_terminal(number):
                self._program.send_signal(number if first else signal.SIGKILL)

    def _by_terminal(self, number: int) -> bool:
        """Return whether the terminal sends this signal to the program as well as to the launcher.
        If so, the launcher does not pass the signal on, because a second signal would interrupt the
        clean-up that the first signal has started.

        If Ctrl-C is pressed while the program is being started, it can happen that only the
        launcher gets the signal. The program then runs until the grace is over.
        """
        return number == signal.SIGINT and self._shares_terminal

    def _worker_exited(self, index: int, role: RunningRole | None, restarts: bool) -> None:
        if role is not None:
            from zmqdist.servers.dispatch_server import report_exit

            report_exit(self._dispatcher, "worker", index, role.pid, role.exit_code, role.tail)
        if self._elastic is not None:
            self._elastic.worker_exited(index, role, restarts)

    def _report_room(self) -> None:
        """Tell the elasticity machine for how many workers the hosts have room. `run` calls this
        method before it starts the workers. When a host is lost, the reader thread of the link to
        that host calls it again.
        """
        with self._lock:
            # with the lock, the number that was computed last reaches the machine last
            if self._elastic is not None:
                self._elastic.room_changed(*self._room())

    def _evaluator_exited(self, child: Child) -> None:
        if child.exit_code and not self._program_over:
            how = errors.describe_exit(child.exit_code)
            self._say(
                f"[{child.name.replace(':', '-')}] ended ({how}); nothing is evaluated any more"
            )

    def _wait_for_evaluator(self, evaluator: Child) -> None:
        """Wait until the evaluator has ended, `grace_s` has passed, or a signal has arrived."""
        until = time.monotonic() + self._grace_s
        while not self._signals and time.monotonic() < until and not evaluator.ended.wait(0.05):
            pass
        self._program_over = True


def _advertised(section: ServingJob, bound: str) -> str:
    """Return the address at which other processes reach a task that binds the address `bound`."""
    return (
        bound
        if section.advertise is None
        else advertised_address(section.advertise, split(bound)[1])
    )


def _in_foreground() -> bool:
    """Return whether Ctrl-C at the terminal signals the process group of this process. Standard
    input need not be the terminal."""
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _end_with_parent_apart() -> None:
    """Put this process into a process group of its own, and call `end_with_parent`. The child calls
    this before it executes the program.

    A signal to the launcher's process group then arrives at the program only once, when the
    launcher passes it on. A second KeyboardInterrupt would interrupt the clean-up that the first
    KeyboardInterrupt has started.
    """
    os.setpgid(0, 0)
    end_with_parent()


def _with_this_python(command: Sequence[str]) -> list[str]:
    return [sys.executable, *command[1:]] if command[0] in ("python", "python3") else list(command)


def _print(line: str) -> None:
    # Write each line with one write, because the program writes to the same terminal. With
    # PYTHONUNBUFFERED, `print` makes two writes.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@errors.naming_system_errors()
def launch(
    config: ClusterConfig,
    arguments: Sequence[str] = (),
    *,
    say: Say = _print,
    grace_s: float = GRACE_S,
    dashboard: bool = False,
) -> int:
    """Run a cluster file, and return the program's exit code. The arguments are those of
    `Launch`.
    """
    return Launch(config, arguments, say, grace_s, dashboard).run()
