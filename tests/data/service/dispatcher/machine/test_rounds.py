"""Coordinated reads in the dispatcher's machine: all consumers agree on the rounds in which tasks
begin and end, even after a restart."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zmqdist import errors
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


def all_say(clients: list[Client], *stopped: int, lost: list[dict[int, int]] | None = None) -> None:
    """Exchange messages until all clients know the newest version, so that their requests wait."""
    for _ in range(3):
        for index, client in enumerate(clients):
            client.say(stopped[index] if stopped else -1, lost[index] if lost else None)
    for client in clients:
        client.hear()


def test_workers_that_are_present_at_the_start_begin_at_round_0() -> None:
    service = Service()
    service.worker(11)
    service.worker(12)
    clients = service.open()
    service.work(11)
    service.work(12)
    all_say(clients)
    assert [each.starts() for each in clients] == [{4000: 0, 4001: 0}] * 3
    assert not any(each.hold for each in clients)


def test_a_new_worker_begins_at_the_highest_round_at_which_a_consumer_stopped() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    service.worker(12)
    all_say(clients)
    assert all(each.hold for each in clients)
    assert [list(each.starts()) for each in clients] == [[4000]] * 3
    all_say(clients, 5, 9, 6)
    assert [each.starts()[4001] for each in clients] == [9, 9, 9]
    assert not any(each.hold for each in clients)


def test_no_task_begins_before_all_consumers_are_present_and_have_stopped() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    service.worker(12)
    all_say(clients)
    clients[0].say(5)
    clients[1].say(5)
    clients[2].say(-1)
    assert 4001 not in clients[0].starts()
    assert not clients[0].hear()
    clients[2].say(7)
    assert clients[0].hear()
    assert clients[0].starts()[4001] == 7


def test_both_clients_of_one_consumer_have_to_stop() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    terms = r.Terms("1000", r.OFF, CONSUMERS)
    other = service.answers[service.ask(ev.OpenRequest, 999, "job", 0, terms, consumer=0)][0]
    service.worker(12)
    all_say(clients)
    all_say(clients, 5, 5, 5)
    assert all(each.hold for each in clients)
    service.handle(ev.ReleaseRequest("gone", 7, other))
    all_say(clients, 5, 5, 5)
    assert not any(each.hold for each in clients)


def test_workers_that_join_together_begin_together() -> None:
    service = Service()
    clients = service.open()
    for incarnation in (11, 12, 13):
        service.worker(incarnation)
    all_say(clients, 1, 1, 1)
    assert [set(each.starts().values()) for each in clients] == [{1}] * 3


def test_a_lost_task_ends_before_the_lowest_round_that_a_consumer_lacks() -> None:
    service = Service()
    service.worker(11)
    service.worker(12)
    clients = service.open()
    all_say(clients)
    service.handle(ev.WorkerGone(11))
    lost = [{4000: 8}, {4000: 7}, {4000: 8}]
    for client, told in zip(clients[:2], lost[:2], strict=True):
        client.say()
        client.say(lost=told)
        assert not client.ended
    clients[2].say()
    assert clients[2].tasks[0][3] == -1  # the dispatcher has lost the worker, too
    clients[2].say(lost=lost[2])
    for client in clients:
        client.hear()
        assert client.ended == {4000: 7}


def test_a_task_that_one_consumer_still_reads_goes_on() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    all_say(clients, lost=[{4000: 8}, {4000: 8}, {}])
    assert not any(each.ended for each in clients)
    assert not service.machine.state.tasks[4000].is_over


def test_a_lost_reply_is_sent_again() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    all_say(clients)
    all_say(clients, lost=[{4000: 3}] * 3)
    late = clients[0]
    late.ended, late.version = {}, 0
    late.say(lost={4000: 3})
    assert late.ended == {4000: 3}


def test_another_incarnation_of_a_worker_has_a_task_of_its_own() -> None:
    service = Service()
    service.worker(11, "worker:0")
    clients = service.open()
    service.handle(ev.WorkerGone(11))
    service.worker(12, "worker:0")
    all_say(clients)
    all_say(clients, 4, 4, 4, lost=[{4000: 3}] * 3)
    for client in clients:
        assert client.ended == {4000: 3}
        assert client.starts() == {4001: 4}


def test_an_incarnation_that_reconnects_continues_its_task() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    service.work(11)
    service.handle(ev.WorkerGone(11))
    service.worker(11)
    all_say(clients)
    assert [each.starts() for each in clients] == [{4000: 0}] * 3
    assert all(each.tasks[0][3] == 11 for each in clients)
    assert not any(each.hold for each in clients)


def test_a_worker_that_is_lost_before_its_task_began_delays_no_consumer() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    service.worker(12)
    all_say(clients)
    service.handle(ev.WorkerGone(12))
    all_say(clients)
    assert not any(each.hold for each in clients)
    service.now = 100.0
    service.handle(Ticked())
    assert list(service.machine.state.workers) == [1]


def test_a_task_of_a_worker_that_left_for_good_still_ends_where_all_agree() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    service.handle(ev.WorkerGone(11, left=True))
    all_say(clients)
    assert all(each.tasks[0][3] == -1 for each in clients)
    all_say(clients, lost=[{4000: 2}, {4000: 1}, {4000: 2}])
    assert [each.ended for each in clients] == [{4000: 1}] * 3
    assert service.machine.state.iterations[2000].state is not r.IterationState.FINISHED


def test_decisions_are_in_the_journal_and_open_ones_are_requested_again() -> None:
    service = Service()
    service.worker(11)
    clients = service.open()
    all_say(clients, lost=[{4000: 6}, {4000: 5}, {4000: 6}])
    service.worker(12)
    clients[0].say(8)
    service.restart()
    for incarnation in (11, 12):
        service.worker(incarnation)
    for client in clients:
        client.version = 0
    clients[1].ended = {}
    clients[1].say(lost={4000: 5})
    assert clients[1].ended == {4000: 5}
    all_say(clients, 8, 9, 8)
    begun = {each.starts()[4001] for each in clients}
    assert begun == {9}
    service.restart()
    assert service.machine.state.tasks[4001].starting_round == 9
    assert service.machine.state.tasks[4000].end_round == 5


def test_only_consumers_may_report_rounds() -> None:
    service = Service(consumers=0)
    service.worker(11)
    service.ask(ev.RegisterRequest, 1, None, "fingerprint", "{}")
    opened = service.ask(ev.OpenRequest, 5, "job", 0, r.Terms("1000", r.OFF))
    number = service.answers[opened][0]
    token = service.ask(ev.WatchRequest, 7, number, 0, 0.0, -1, {4000: 3})
    assert service.answers[token][0] == errors.FAILED_PRECONDITION


@pytest.mark.parametrize("consumer", [-1, CONSUMERS])
def test_a_consumer_that_the_job_does_not_have_is_refused(consumer: int) -> None:
    service = Service()
    service.ask(ev.RegisterRequest, 1, None, "fingerprint", "{}")
    token = service.ask(
        ev.OpenRequest, 5, "job", 0, r.Terms("1000", r.OFF, CONSUMERS), consumer=consumer
    )
    code, message = service.answers[token]
    assert code == errors.FAILED_PRECONDITION
    assert f"Requesting data for consumer index {consumer}" in message


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
