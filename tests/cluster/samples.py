"""Cluster files for the tests: right ones, and one for each mistake with the sentence that the user
is told."""

from __future__ import annotations

PROGRAM = "program: python train.py\n"
TOP = "name: c\n" + PROGRAM
"""Two lines; the jobs of a sample follow from line 3 on."""

RIGHT: dict[str, str] = {
    "the smallest": TOP + "jobs: {worker: {count: 1}}\n",
    "a dispatcher alone, with nothing after its colon": TOP + "jobs:\n  dispatcher:\n",
    "the page of the documentation": """\
name: digits
jobs:
  dispatcher: {address: 127.0.0.1:0, work_dir: null}
  worker:     {count: 2, slots: 1}
  ps:         {count: 1}
program: python examples/digits.py          # runs as the chief
security: {curve: auto, keys: null}
""",
    "everything": """\
name: big.cluster_1-a
jobs:
  dispatcher:
    address: "[::1]:5050"
    work_dir: journal
    lease_s: 5
    reconnect_grace_s: 0.5
    attempts_max: 1
    queue_max: 10
    queue_bytes_max: 5000000000
  worker:
    tasks: {0: "node-a:5051", 7: "node-b:5051"}
    slots: auto
    orphan_limit_s: 1.5
    cancel_grace_s: 0
    env: {A: "1", B: ""}
  ps: {tasks: [node-a:5052, node-b:5052], env: {A: x}}
  chief: {tasks: [node-a:5053]}
  evaluator: {count: 1, program: python evaluate.py}
program: [python, "train me.py", --fast]
security: {curve: true, keys: keys}
""",
    "a chief and an evaluator, with nothing after their colons": TOP
    + "jobs:\n  worker: {count: 1}\n  chief:\n  evaluator:\n",
    "an anchor that is used twice": TOP
    + "jobs:\n  worker: {count: 1, env: &e {A: '1'}}\n  ps: {count: 1, env: *e}\n",
    "a security section of which all is commented out": TOP
    + "jobs: {worker: {count: 1}}\nsecurity:\n  # curve: true\n",
    "hosts that ssh reaches": TOP
    + "jobs: {worker: {count: 3}, ps: {count: 1}}\nlauncher: ssh\nssh:\n  hosts: [a, me@b, {host: "
    "c, slots: 2}]\n" + "  python: /opt/python\n  options: [-p, '2222']\n",
    "with a byte order mark": "\ufeff" + TOP + "jobs: {worker: {count: 1}}\n",
    "as JSON": '{"name": "c", "program": ["x"], "jobs": {"worker": {"tasks": ["a:1"]}}}',
}

STRUCTURE: dict[str, tuple[str, str]] = {
    "a typo in a job's key": (
        TOP + "jobs:\n  worker:\n    cuont: 2\n",
        "c.yaml:5: jobs.worker.cuont: unknown key (did you mean count?)",
    ),
    "a key of another section": (
        TOP + "jobs:\n  ps:\n    count: 1\n    zzz: 2\n",
        (
            "c.yaml:6: jobs.ps.zzz: unknown key (known are: count, tasks, env, restarts, host, "
            "advertise)"
        ),
    ),
    "an unknown section": (
        TOP + "jobs: {worker: {count: 1}}\nsecurty: {}\n",
        "c.yaml:4: securty: unknown key (did you mean security?)",
    ),
    "a key that is a number": (
        TOP + "jobs: {worker: {count: 1}}\n7: x\n",
        (
            "c.yaml:4: [7]: unknown key (known are: name, jobs, program, security, ports, code, "
            "launcher, ssh, slurm, kubernetes, ray)"
        ),
    ),
    "a bad job name": (
        TOP + "jobs:\n  wroker: {count: 1}\n",
        "c.yaml:4: jobs.wroker: unknown job (did you mean worker?)",
    ),
    "no name": (
        PROGRAM + "jobs: {worker: {count: 1}}\n",
        "c.yaml:1: name: required key is missing",
    ),
    "no program": (
        "name: c\njobs: {worker: {count: 1}}\n",
        "c.yaml:1: program: required key is missing",
    ),
    "no jobs": ("# a comment\n" + TOP, "c.yaml:2: jobs: required key is missing"),
    "jobs without a job": (
        TOP + "jobs: {}\n",
        "c.yaml:3: jobs: no job is given (a cluster has at least a worker)",
    ),
    "a bad cluster name": (
        "name: my cluster\n" + PROGRAM + "jobs: {worker: {count: 1}}\n",
        (
            "c.yaml:1: name: expected a name of at most 64 letters, digits, '.', '_' or '-', got 'my "
            "cluster'"
        ),
    ),
    "a cluster name with a line break": (
        'name: "c\\n"\n' + PROGRAM + "jobs: {worker: {count: 1}}\n",
        (
            "c.yaml:1: name: expected a name of at most 64 letters, digits, '.', '_' or '-', got "
            "'c\\n'"
        ),
    ),
    "a word for a number": (
        TOP + "jobs:\n  worker:\n    count: many\n",
        "c.yaml:5: jobs.worker.count: expected a whole number, 1 to 10000, got 'many'",
    ),
    "a bool for a number": (
        TOP + "jobs:\n  worker: {count: 1}\n  dispatcher:\n    attempts_max: yes\n",
        "c.yaml:6: jobs.dispatcher.attempts_max: expected a whole number above 0, got true",
    ),
    "a fraction for a whole number": (
        TOP + "jobs:\n  worker:\n    count: 1.5\n",
        "c.yaml:5: jobs.worker.count: expected a whole number, 1 to 10000, got 1.5",
    ),
    "no workers": (
        TOP + "jobs:\n  worker: {count: 0}\n",
        "c.yaml:4: jobs.worker.count: expected a whole number, 1 to 10000, got 0",
    ),
    "too many workers": (
        TOP + "jobs:\n  worker: {count: 10001}\n",
        "c.yaml:4: jobs.worker.count: expected a whole number, 1 to 10000, got 10001",
    ),
    "no slots": (
        TOP + "jobs:\n  worker: {count: 1, slots: 0}\n",
        "c.yaml:4: jobs.worker.slots: expected a whole number, 1 to 4096, or auto, got 0",
    ),
    "slots that are neither a number nor auto": (
        TOP + "jobs:\n  worker: {count: 1, slots: all}\n",
        "c.yaml:4: jobs.worker.slots: expected a whole number, 1 to 4096, or auto, got 'all'",
    ),
    "a negative duration": (
        TOP + "jobs:\n  dispatcher:\n    address: 127.0.0.1:0\n    lease_s: -1\n",
        "c.yaml:6: jobs.dispatcher.lease_s: expected a number of seconds above 0, got -1",
    ),
    "a lease of no time": (
        TOP + "jobs:\n  dispatcher: {lease_s: 0}\n",
        "c.yaml:4: jobs.dispatcher.lease_s: expected a number of seconds above 0, got 0",
    ),
    "a duration with a unit": (
        TOP + "jobs:\n  dispatcher: {lease_s: 5s}\n",
        "c.yaml:4: jobs.dispatcher.lease_s: expected a number of seconds above 0, got '5s'",
    ),
    "count together with tasks": (
        TOP + "jobs:\n  worker:\n    tasks: [a:1]\n    count: 1\n",
        "c.yaml:6: jobs.worker.count: is given together with tasks (leave one of them out)",
    ),
    "neither count nor tasks": (
        TOP + "jobs:\n  worker: {slots: 2}\n",
        "c.yaml:4: jobs.worker: has neither count nor tasks (write for example count: 1)",
    ),
    "a worker with nothing after its colon": (
        TOP + "jobs:\n  worker:\n",
        "c.yaml:4: jobs.worker: has neither count nor tasks (write for example count: 1)",
    ),
    "an empty list of tasks": (
        TOP + "jobs:\n  worker: {tasks: []}\n",
        (
            "c.yaml:4: jobs.worker.tasks: expected a list of host:port, or a mapping of index to "
            "host:port, got an empty list"
        ),
    ),
    "an empty mapping of tasks": (
        TOP + "jobs:\n  worker: {tasks: {}}\n",
        (
            "c.yaml:4: jobs.worker.tasks: expected a list of host:port, or a mapping of index to "
            "host:port, "
            "got an empty mapping"
        ),
    ),
    "one address instead of a list": (
        TOP + "jobs:\n  worker: {tasks: a:1}\n",
        (
            "c.yaml:4: jobs.worker.tasks: expected a list of host:port, or a mapping of index to "
            "host:port, got 'a:1'"
        ),
    ),
    "a number among the addresses": (
        TOP + "jobs:\n  worker:\n    tasks:\n    - a:1\n    - 5050\n",
        (
            "c.yaml:7: jobs.worker.tasks[1]: expected a list of host:port, or a mapping of index to "
            "host:port, got 5050"
        ),
    ),
    "a sparse index that is no number": (
        TOP + "jobs:\n  worker:\n    tasks:\n      0: a:1\n      one: b:1\n",
        (
            "c.yaml:7: jobs.worker.tasks.one: expected a list of host:port, or a mapping of index "
            "to host:port, "
            "got the key 'one'"
        ),
    ),
    "a negative sparse index": (
        TOP + "jobs:\n  worker:\n    tasks: {-1: a:1}\n",
        (
            "c.yaml:5: jobs.worker.tasks[-1]: expected a list of host:port, or a mapping of index "
            "to host:port, "
            "got the key -1"
        ),
    ),
    "a number for an environment variable": (
        TOP + "jobs:\n  worker:\n    count: 1\n    env:\n      A: b\n      PASSWORD: 12345\n",
        (
            "c.yaml:8: jobs.worker.env.PASSWORD: expected a mapping of names to texts in quotes, got "
            "a number"
        ),
    ),
    "a negative number among Ray's resources": (
        TOP + "jobs: {worker: {count: 1}}\nray:\n  worker:\n    resources: {a100: -1}\n",
        (
            "c.yaml:6: ray.worker.resources.a100: expected a mapping of names to numbers, 0 or more, "
            "got -1"
        ),
    ),
    "a list where a section belongs": (
        TOP + "jobs: [worker]\n",
        "c.yaml:3: jobs: expected a mapping of keys to values, got a list",
    ),
    "a word where a job's section belongs": (
        TOP + "jobs:\n  worker: 2\n",
        "c.yaml:4: jobs.worker: expected a mapping of keys to values, got 2",
    ),
    "an unknown word for curve": (
        TOP + "jobs: {worker: {count: 1}}\nsecurity:\n  curve: maybe\n",
        "c.yaml:5: security.curve: expected auto, true or false, got 'maybe'",
    ),
    "a launcher that there is not": (
        TOP + "jobs: {worker: {count: 1}}\nlauncher: nomad\n",
        "c.yaml:4: launcher: expected local, ssh, slurm, kubernetes or ray, got 'nomad'",
    ),
    "a number for a program": (
        "name: c\nprogram: 3\njobs: {worker: {count: 1}}\n",
        "c.yaml:2: program: expected a command line, or a list of words, got 3",
    ),
    "a number among the words of a program": (
        "name: c\njobs: {worker: {count: 1}}\nprogram:\n- sleep\n- 3\n",
        "c.yaml:5: program[1]: expected a command line, or a list of words, got 3",
    ),
    "a host without a name": (
        TOP + "jobs: {worker: {count: 1}}\nlauncher: ssh\nssh: {hosts: [a, {slots: 2}]}\n",
        "c.yaml:5: ssh.hosts[1]: expected a list of hosts, or of {host, slots}, got a mapping",
    ),
    "the launcher's own section": (
        TOP + "jobs: {worker: {count: 1}}\nruntime: {dispatcher: 'zmq://127.0.0.1:5'}\n",
        "c.yaml:4: runtime: is written by the launcher only (leave it out)",
    ),
    "a list for the whole file": (
        "- name: c\n",
        "c.yaml:1: (file): expected a mapping of keys to values, got a list",
    ),
}
"""What a JSON Schema can see, too."""

MEANING: dict[str, tuple[str, str]] = {
    "an address without a port": (
        TOP + "jobs:\n  dispatcher: {address: localhost}\n",
        "c.yaml:4: jobs.dispatcher.address: bad address 'localhost': no port; write host:port",
    ),
    "a port above the range": (
        TOP + "jobs:\n  dispatcher: {address: localhost:70000}\n",
        (
            "c.yaml:4: jobs.dispatcher.address: bad address 'localhost:70000': port 70000 is above "
            "65535"
        ),
    ),
    "an address with a scheme": (
        TOP + "jobs:\n  dispatcher: {address: 'tcp://127.0.0.1:5'}\n",
        (
            "c.yaml:4: jobs.dispatcher.address: bad address 'tcp://127.0.0.1:5': write host:port "
            "without tcp://"
        ),
    ),
    "an IPv6 address without brackets": (
        TOP + "jobs:\n  worker:\n    tasks:\n    - '::1:5'\n",
        (
            "c.yaml:6: jobs.worker.tasks[0]: bad address '::1:5': an IPv6 host needs brackets, like "
            "[::1]:5050"
        ),
    ),
    "an address without a host": (
        TOP + "jobs:\n  dispatcher: {address: ':5050'}\n",
        "c.yaml:4: jobs.dispatcher.address: bad address ':5050': it names no host",
    ),
    "a task that nobody could connect to": (
        TOP + "jobs:\n  worker: {tasks: ['0.0.0.0:5']}\n",
        "c.yaml:4: jobs.worker.tasks[0]: bad address '0.0.0.0:5': it names no host",
    ),
    "a task whose port nobody knows": (
        TOP + "jobs:\n  worker: {tasks: ['127.0.0.1:0']}\n",
        (
            "c.yaml:4: jobs.worker.tasks[0]: bad address '127.0.0.1:0': the other tasks must know the "
            "port (or use count)"
        ),
    ),
    "an address that is listed twice": (
        TOP + "jobs:\n  worker:\n    tasks: [a:1, b:1]\n  ps:\n    tasks:\n      4: b:1\n",
        "c.yaml:8: jobs.ps.tasks[4]: address b:1 is listed twice (first at jobs.worker.tasks[1])",
    ),
    "a dispatcher for everybody without CURVE": (
        (
            "name: c\nsecurity: {curve: false}\nprogram: x\njobs:\n  dispatcher: {address: "
            "'0.0.0.0:5050'}\n"
        ),
        (
            "c.yaml:5: jobs.dispatcher.address: address 0.0.0.0:5050 is not on loopback and "
            "security.curve is false: "
            "any peer could connect (write curve: auto, or use 127.0.0.1)"
        ),
    ),
    "a worker on another host without CURVE": (
        TOP + "security: {curve: false}\njobs: {worker: {tasks: ['127.0.0.1:1', 'node-b:1']}}\n",
        (
            "c.yaml:4: jobs.worker.tasks[1]: address node-b:1 is not on loopback and "
            "security.curve is false: "
            "any peer could connect (write curve: auto, or use 127.0.0.1)"
        ),
    ),
    "too many addresses": (
        TOP
        + "jobs:\n  worker:\n    tasks: ["
        + ",".join(f"a:{port}" for port in range(1, 10_002))
        + "]\n",
        "c.yaml:5: jobs.worker.tasks: has 10001 tasks, at most 10000 are allowed",
    ),
    "ssh without hosts": (
        TOP + "jobs: {worker: {count: 1}}\nlauncher: ssh\n",
        (
            "c.yaml:1: ssh.hosts: launcher: ssh needs at least one host (write for example ssh: "
            "{hosts: [node-a, node-b]})"
        ),
    ),
    "a host that is listed twice": (
        TOP
        + "jobs: {worker: {count: 1}}\nlauncher: ssh\nssh:\n  hosts:\n  - a\n  - {host: a, slots: "
        "2}\n",
        "c.yaml:8: ssh.hosts[1]: host a is listed twice (write its slots once)",
    ),
    "more roles than slots": (
        TOP + "jobs: {worker: {count: 3}, ps: {count: 1}}\nlauncher: ssh\nssh: {hosts: [{host: a, "
        "slots: 2}, {host: b, slots: 1}]}\n",
        (
            "c.yaml:5: ssh.hosts: the jobs have 4 workers and ps, and the hosts have 3 slots (raise "
            "slots, or leave it out)"
        ),
    ),
    "addresses for a launcher that finds them": (
        TOP + "jobs: {worker: {tasks: [a:1]}}\nlauncher: ssh\nssh: {hosts: [a]}\n",
        (
            "c.yaml:3: jobs.worker.tasks: launcher: ssh finds the addresses itself (write count "
            "instead)"
        ),
    ),
    "hosts without keys": (
        TOP + "jobs: {worker: {count: 1}}\nlauncher: ssh\nssh: {hosts: [a]}\nsecurity: {curve: "
        "false}\n",
        (
            "c.yaml:6: security.curve: launcher: ssh connects hosts, which needs keys (write curve: "
            "auto)"
        ),
    ),
    "two evaluators": (
        TOP + "jobs:\n  evaluator: {tasks: [a:1, a:2]}\n",
        "c.yaml:4: jobs.evaluator.tasks: there is at most one evaluator",
    ),
    "an evaluator whose program has an open quote": (
        TOP + 'jobs:\n  evaluator: {program: "python \'e.py"}\n',
        (
            "c.yaml:4: jobs.evaluator.program: cannot be split into words: No closing quotation (a "
            "list of words needs no quotes)"
        ),
    ),
    "restarts below zero": (
        TOP + "jobs:\n  ps: {count: 1, restarts: -1}\n",
        "c.yaml:4: jobs.ps.restarts: expected a whole number, 0 or more, got -1",
    ),
    "two chiefs": (
        TOP + "jobs:\n  chief: {count: 2}\n",
        "c.yaml:4: jobs.chief.count: there is at most one chief (others are workers)",
    ),
    "a program with an open quote": (
        "name: c\nprogram: python 'x.py\njobs: {worker: {count: 1}}\n",
        (
            "c.yaml:2: program: cannot be split into words: No closing quotation (a list of words "
            "needs no quotes)"
        ),
    ),
    "an empty program": (
        "name: c\nprogram: ' '\njobs: {worker: {count: 1}}\n",
        "c.yaml:2: program: is empty (write the command line, for example python train.py)",
    ),
    "an environment variable with an equals sign": (
        TOP + "jobs: {worker: {count: 1, env: {A=B: x}}}\n",
        "c.yaml:3: jobs.worker.env.'A=B': is no name for an environment variable",
    ),
}
"""What takes a look at more than types."""

YAML: dict[str, tuple[str, str]] = {
    "a duplicate key": (
        TOP + "jobs:\n  worker: {count: 1}\n  worker: {count: 2}\n",
        "c.yaml:5: jobs.worker: duplicate key (first on line 4)",
    ),
    "a duplicate key in two spellings": (
        TOP + "jobs: {worker: {tasks: {1: a:1, 0x1: b:1}}}\n",
        "c.yaml:3: jobs.worker.tasks[1]: duplicate key (first on line 3)",
    ),
    "a tab in the indentation": (
        "name: c\njobs:\n\tworker: {count: 1}\n",
        "c.yaml:3: (file): not YAML: a tab in the indentation (indent with spaces)",
    ),
    "an open quote": (
        'name: "c\n' + PROGRAM,
        "c.yaml:3: (file): not YAML: found unexpected end of stream",
    ),
    "a key without a colon": (
        TOP + "jobs\n",
        "c.yaml:4: (file): not YAML: could not find expected ':'",
    ),
    "two documents": (
        TOP + "---\n" + TOP,
        "c.yaml:3: (file): not YAML: but found another document",
    ),
    "a control character": (
        TOP + "jobs: é\x01\n",
        "c.yaml:3: (file): not YAML: it has a control character",
    ),
    "nothing": (
        "",
        "c.yaml:1: (file): is empty (zmqdist validate --schema prints the keys of a cluster file)",
    ),
    "only comments": (
        "# a\n# b\n",
        "c.yaml:1: (file): is empty (zmqdist validate --schema prints the keys of a cluster file)",
    ),
    "a word for the whole file": (
        "hello\n",
        "c.yaml:1: (file): expected a mapping of keys to values, got 'hello'",
    ),
    "an object of the file's choosing": (
        TOP + "jobs: !!python/object/apply:os.system [echo x]\n",
        (
            "c.yaml:3: jobs: the tag 'tag:yaml.org,2002:python/object/appl... is not allowed (write a "
            "plain value)"
        ),
    ),
    "a tag on a word": (
        TOP + "jobs: {worker: {count: !secret x}}\n",
        "c.yaml:3: jobs.worker.count: the tag '!secret' is not allowed (write a plain value)",
    ),
    "a tag that does not fit its value": (
        TOP + "jobs: {worker: {count: !!int x}}\n",
        "c.yaml:3: jobs.worker.count: 'x' cannot be read as int",
    ),
    "a duration for ever": (
        TOP + "jobs: {dispatcher: {lease_s: .inf}}\n",
        "c.yaml:3: jobs.dispatcher.lease_s: '.inf' is not a finite number",
    ),
    "a duration that is no number": (
        TOP + "jobs: {dispatcher: {lease_s: .nan}}\n",
        "c.yaml:3: jobs.dispatcher.lease_s: '.nan' is not a finite number",
    ),
    "a number of ten thousand digits": (
        TOP + "jobs: {worker: {count: 0x" + "f" * 10_000 + "}}\n",
        "c.yaml:3: jobs.worker.count: expected a whole number, 1 to 10000, got a very large number",
    ),
    "a list as a key": (
        TOP + "jobs:\n  ? [a]\n  : 1\n",
        "c.yaml:4: jobs: a key must be a word or a number",
    ),
    "a text with a NUL": (
        'name: "c\\0"\n' + PROGRAM,
        "c.yaml:1: name: has a character that no text can have",
    ),
    "an alias that is not there": (
        TOP + "jobs: *x\n",
        "c.yaml:3: (file): not YAML: found undefined alias",
    ),
    "an alias that contains itself": (
        TOP + "jobs: &x\n  worker: *x\n",
        "c.yaml:3: jobs: has an alias that makes it more than 64 levels deep",
    ),
    "a page of aliases to aliases": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n"
            for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "c.yaml:5: e: makes the file larger than 100000 values when its aliases are expanded",
    ),
    "nesting without end": (
        TOP + "jobs: " + "[" * 100_000,
        "c.yaml:3: (file): is nested more than 64 levels deep",
    ),
    "a file that is too large": (
        "# " + "x" * 2**20,
        "c.yaml:1: (file): is larger than 1048576 bytes: not a cluster file",
    ),
}
"""What is wrong before keys matter."""

MISTAKES: dict[str, tuple[str, str]] = {**STRUCTURE, **MEANING, **YAML}
