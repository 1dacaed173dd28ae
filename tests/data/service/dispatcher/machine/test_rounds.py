"""Coordinated reads in random histories: all consumers agree on the first and last rounds of
tasks, even after a restart."""

from __future__ import annotations

import random
from typing import Any

from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.events import Ticked

CONSUMERS = 3


class Service:
    """The machine with a journal, and clients that always have one request for news in flight."""

    def __init__(self, consumers: int = CONSUMERS) -> None:
        self.rules = Rules(worker_timeout_s=5.0, fault_tolerant=True)
        self.machine = DataDispatcherMachine(self.rules, number=7, now=0.0)
        self.now = 0.0
        self.journal: list[bytes] = []
        self.answers: dict[Any, Any] = {}
        self.tokens = 0
        self.consumers = consumers

    def token(self) -> str:
        self.tokens += 1
        return f"token {self.tokens}"

    def handle(self, event: ev.Event) -> None:
        effects = self.machine.handle(event, self.now)
        while effects:
            effect = effects.pop(0)
            match effect:
                case ev.CommitJournal(records):
                    self.journal += records
                    effects += self.machine.handle(ev.JournalCommitted(), self.now)
                case ev.ReplyToRequest(token, value):
                    self.answers[token] = value
                case ev.FailRequest(token, code, message):
                    self.answers[token] = (code, message)

    def ask(self, kind: Any, *args: Any, **named: Any) -> str:
        token = self.token()
        self.handle(kind(token, *args, **named))
        return token

    def restart(self) -> None:
        """End the dispatcher, and restore another one from the journal."""
        self.machine = DataDispatcherMachine(
            self.rules, number=random.getrandbits(30), now=self.now
        )
        records = [r.decode(each) for each in self.journal]
        self.machine.restore(DurableState(number=7), records, self.now)

    def worker(self, incarnation: int, name: str | None = None) -> None:
        name = name or f"worker:{incarnation}"
        self.handle(ev.WorkerJoined(name, f"{name}:5000", incarnation))
        self.work(incarnation)

    def work(self, incarnation: int) -> None:
        """Have the worker begin and drop the tasks that the dispatcher names."""
        has: dict[int, str] = {}
        while True:
            token = self.ask(ev.WorkRequest, 7, incarnation, dict(has), ())
            told = self.answers.get(token)
            if told is None:
                return
            has.update({each[0]: "there" for each in told[1]})
            for task in told[2]:
                del has[task]

    def open(self) -> list[Client]:
        if not self.machine.state.datasets:
            self.ask(ev.RegisterRequest, 1, None, "fingerprint", "{}")
        return [Client(self, each) for each in range(self.consumers)]


class Client:
    def __init__(self, service: Service, consumer: int) -> None:
        self.service = service
        terms = r.Terms("1000", r.OFF, service.consumers)
        token = service.ask(ev.OpenRequest, 100 + consumer, "job", 0, terms, consumer=consumer)
        self.number = service.answers[token][0]
        self.version, self.tasks, self.hold = 0, [], False
        self.ended: dict[int, int] = {}
        self.question = ""

    def say(self, stopped: int = -1, lost: dict[int, int] | None = None) -> None:
        self.question = self.service.ask(
            ev.WatchRequest, 7, self.number, self.version, 0.0, stopped, lost or {}
        )
        self.hear()

    def hear(self) -> bool:
        """Return the reply, if it has arrived."""
        told = self.service.answers.pop(self.question, None)
        if told is None:
            return False
        self.version, self.tasks, _, self.hold, ended, _ = told
        self.ended.update(ended)
        return True

    def starts(self) -> dict[int, int]:
        return {task[0]: task[5] for task in self.tasks}


def test_consumers_show_the_same_rounds_of_every_task(seed: int) -> None:
    """At random, workers join, leave and return, the dispatcher restarts, and replies are lost; in
    the end all consumers agree."""
    dice = random.Random(seed)
    service = Service()
    clients = service.open()
    lives: dict[str, int] = {}
    begun = dict.fromkeys(range(CONSUMERS), 0)
    stopped = dict.fromkeys(range(CONSUMERS), -1)
    lost: list[dict[int, int]] = [{} for _ in clients]

    def speak(index: int) -> None:
        """Do what a reader does: stop where it has promised to, report its round, continue."""
        client = clients[index]
        if stopped[index] < 0:
            begun[index] += dice.randrange(4)
        if not calm and dice.random() < 0.1:
            client.version = 0  # the earlier reply was lost
        client.say(stopped[index], lost[index])
        heed(index)

    def heed(index: int) -> None:
        client = clients[index]
        for number, start in client.starts().items():
            known = starts.setdefault(number, start)
            assert known == start
            if (index, number) not in heard:
                assert start == 0 or start > begun[index] or start >= stopped[index] >= 0
                heard.add((index, number))
        for number, end in client.ended.items():
            assert ends.setdefault(number, end) == end
        lost[index] = {
            each[0]: lost[index].get(each[0], each[5] + dice.randrange(9))
            for each in client.tasks
            if each[3] < 0 and each[0] not in client.ended
        }
        stopped[index] = (
            (stopped[index] if stopped[index] >= 0 else begun[index] + 1) if client.hold else -1
        )

    calm = False
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    heard: set[tuple[int, int]] = set()
    for incarnation in range(20, 140):
        name = f"worker:{dice.randrange(4)}"
        chance = dice.random()
        if chance < 0.3 and name in lives:
            service.handle(ev.WorkerGone(lives.pop(name), left=dice.random() < 0.3))
        elif chance < 0.6 and name not in lives:
            lives[name] = incarnation
            service.worker(incarnation, name)
        elif chance < 0.65:
            service.restart()
            for each, present in lives.items():
                service.worker(present, each)
            for client in clients:
                client.version = 0
        elif chance < 0.7:
            service.now += 3.0
            service.handle(Ticked())
        speak(dice.randrange(CONSUMERS))
    calm = True  # from now on nothing is lost, and there is a worker, so the consumers must agree
    if not lives:
        lives["worker:0"] = 140
        service.worker(140, "worker:0")
    for _ in range(8):
        for index in range(CONSUMERS):
            speak(index)
        for index, client in enumerate(clients):
            if client.hear():
                heed(index)
        for present in lives.values():
            service.work(present)
    agreed = [sorted(each.starts().items()) for each in clients]
    assert agreed[0] == agreed[1] == agreed[2]
    assert len(agreed[0]) == len(lives)
    assert starts
