"""Training and reading over links that are cut and mended: results are right, no call hangs, and
how long recovery takes after the mend."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from contextlib import ExitStack
from typing import Any, Final

import zmqdist as zd
from tests.campaigns.proxy import Proxy
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.data import Dataset, service
from zmqdist.limits import PS_PATIENCE_S

CUT_S: Final = (1.0, 3.0, 10.0, 30.0, 60.0)
"""Lengths of cuts, in seconds. The middle one is as long as a lease."""
PATIENCE_S = 60.0
LOOPBACK_ANY = "127.0.0.1:0"
STEPS = 300
ELEMENTS = 20_000


def length(rng: random.Random) -> float:
    """Return the length of a cut in seconds; short ones are more frequent."""
    return rng.choices(CUT_S, (6, 6, 4, 2, 1))[0]


def harm(link: Proxy, rng: random.Random, seconds: float) -> None:
    """Cut a link for some seconds, with a sign to its ends (a reset) or without."""
    (link.cut if rng.random() < 0.5 else link.freeze)()
    time.sleep(seconds)
    link.mend()


class Training:
    """Training steps of two workers on two parameter servers, each behind a link of its own. Each
    step counts once, also a repeated one."""

    def __init__(self, stack: ExitStack) -> None:
        tasks: dict[str, list[str]] = {"worker": [], "ps": []}
        self.links: dict[str, Proxy] = {}
        for job, index in (("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)):
            server = stack.enter_context(
                zd.Server({job: [LOOPBACK_ANY] * 2}, job_name=job, task_index=index)
            )
            link = self.links[f"{job}:{index}"] = stack.enter_context(Proxy(server.target))
            tasks[job].append(link.address)
        self.strategy = zd.ParameterServerStrategy(zd.ClusterSpec(tasks))
        stack.callback(self.strategy.close)
        with self.strategy.scope():
            self.sums = [zd.Variable(0, name=name) for name in ("a", "b")]
        self.values: list[tuple[int, zd.RemoteValue]] = []
        self.refused = 0

    def schedule(self, number: int) -> None:
        sums = self.sums

        def step() -> int:
            for each in sums:
                each.assign_add(number)
            return number

        try:
            self.values.append(
                (number, self.strategy.coordinator.schedule(step, once=True, retries=50))
            )
        except errors.PSUnavailableError:  # the error of an earlier step, which ends the round
            self.refused += 1

    def feed(self, seconds: float) -> None:
        for number in range(1, STEPS + 1):
            self.schedule(number)
            time.sleep(seconds / STEPS)

    def outcome_counts(self) -> tuple[int, int]:
        """Return (the sum of the steps that have succeeded, the sum of those that have failed in
        the round of a lost parameter server)."""
        good = bad = 0
        for number, value in self.values:
            try:
                good += value.get(PATIENCE_S)
            except (errors.PSUnavailableError, errors.CancelledError):
                bad += number
        return good, bad

    def read(self) -> list[int]:
        """Return the values of the variables, once their servers reply."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return [int(each.numpy()) for each in self.sums]
            except errors.PSUnavailableError:
                assert time.monotonic() < deadline, (
                    "a parameter server that is there again does not answer"
                )


def training(seed: int) -> dict[str, Any]:
    """Cut one or two links of a training.

    A parameter server that is away for longer than PS_PATIENCE_S is an error, as promised.
    Successful steps still count once, and after the mend the same strategy continues.
    """
    rng = random.Random(seed)
    seconds = length(rng)
    with ExitStack() as stack:
        training = Training(stack)
        feeding = threading.Thread(target=training.feed, args=(seconds + 2.0,))
        feeding.start()
        time.sleep(0.5)
        hurt = rng.sample(sorted(training.links), rng.choice((1, 2)))
        harming = [
            threading.Thread(
                target=harm, args=(training.links[name], random.Random(rng.random()), seconds)
            )
            for name in hurt
        ]
        for each in harming:
            each.start()
        for each in harming:
            each.join()
        mended = time.monotonic()
        feeding.join()
        good, bad = training.outcome_counts()
        recovery = time.monotonic() - mended
        away = seconds >= PS_PATIENCE_S and any(name.startswith("ps") for name in hurt)
        assert away or (bad, training.refused) == (0, 0), "an error that nobody has promised"
        found = training.read()
        if training.refused + bad == 0:
            assert found == [good] * 2, "an update was lost or made twice"
        assert all(good <= each <= STEPS * (STEPS + 1) // 2 for each in found), (
            "an update was lost or made twice"
        )
        with contextlib.suppress(errors.PSUnavailableError):
            training.strategy.coordinator.join(PATIENCE_S)
        again = training.strategy.coordinator.schedule(lambda: 7)
        assert again.get(PATIENCE_S) == 7
    return {
        "faults": len(hurt),
        "tasks": STEPS,
        "lost": 0,
        "doubled": 0,
        "ended by a lost ps": int(bool(bad or training.refused)),
        "longest cut s": seconds,
        "recovery_s": recovery,
    }


def reading(seed: int) -> dict[str, Any]:
    """Read an epoch exactly once while the links of dispatcher and workers are cut."""
    rng = random.Random(seed)
    seconds = length(rng)
    with ExitStack() as stack:
        dispatcher = stack.enter_context(service.DispatchServer())
        links = [stack.enter_context(Proxy(dispatcher.address)) for _ in range(3)]
        for link in links[1:]:
            stack.enter_context(
                service.WorkerServer(service.WorkerConfig(dispatcher_address=link.address))
            )
        until(lambda: dispatcher.num_workers == 2, "both workers are there")
        pause = (seconds + 2.0) / ELEMENTS
        read = service.distribute(
            "distributed_epoch", f"zmq://{links[0].address}", delivery="exactly_once"
        )
        elements = iter(Dataset.range(ELEMENTS).map(lambda x: x * 3).apply(read))
        stack.callback(elements.close)
        found = [int(next(elements)) for _ in range(500)]
        hurt = rng.sample(links, rng.choice((1, 2)))
        harming = [
            threading.Thread(target=harm, args=(link, random.Random(rng.random()), seconds))
            for link in hurt
        ]
        for each in harming:
            each.start()
        mended = 0.0
        for number, each in enumerate(elements):
            found.append(int(each))
            if number % 100 == 0:
                time.sleep(100 * pause)
            if not mended and not any(thread.is_alive() for thread in harming):
                mended = time.monotonic()
        for thread in harming:
            thread.join()
        recovery = time.monotonic() - mended if mended else 0.0
        assert sorted(found) == [3 * x for x in range(ELEMENTS)], (
            "an element was lost or came twice"
        )
    return {
        "faults": len(hurt),
        "tasks": ELEMENTS,
        "lost": 0,
        "doubled": 0,
        "longest cut s": seconds,
        "recovery_s": recovery,
    }
