"""The task of a coordinated read: rounds begin when all have asked, or are skipped by all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.data.service.helpers import Answer, until
from zmqdist.data import Dataset
from zmqdist.data.service.dispatcher.machine.events import TaskReport
from zmqdist.data.service.reader.delivery import Demand
from zmqdist.data.service.worker.rounds_task import GROUPS_MAX, RoundsRunner
from zmqdist.errors import AbortedError, CancelledError, FailedPreconditionError

MANY = 1 << 20


@contextmanager
def running(consumers: int, dataset: Dataset | None = None) -> Iterator[RoundsRunner]:
    runner = RoundsRunner(
        "test", lambda: iter(dataset or Dataset.counter()), lambda error, what: error, consumers
    )
    try:
        yield runner
    finally:
        runner.close()


def ask(
    runner: RoundsRunner,
    consumer: int,
    round_: int,
    reader: int = 1,
    skipped: bool = False,
    rounds: int = 1,
) -> Answer:
    answer = Answer()
    runner.ask(Demand(rounds, MANY, 0.1, reader, consumer, round_, skipped), answer)
    return answer


def ask_all(runner: RoundsRunner, consumers: int, round_: int, **options: Any) -> list[Answer]:
    return [ask(runner, consumer, round_, **options) for consumer in range(consumers)]


def test_single_consumer_gets_all_in_order() -> None:
    with running(1) as runner:
        assert [ask(runner, 0, round_).result() for round_ in range(10)] == [
            [each] for each in range(10)
        ]


@pytest.mark.parametrize("consumers", [2, 5, 10])
def test_parallel_consumers_share_groups(consumers: int) -> None:
    got: list[list[int]] = [[] for _ in range(consumers)]

    def consume(consumer: int) -> None:
        for round_ in range(30):
            got[consumer] += ask(runner, consumer, round_).result()

    with running(consumers) as runner:
        threads = [threading.Thread(target=consume, args=(each,)) for each in range(consumers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == [list(range(each, 30 * consumers, consumers)) for each in range(consumers)]


def test_round_waits_for_all_consumers() -> None:
    with running(3) as runner:
        first, second = ask(runner, 0, 0), ask(runner, 2, 0)
        assert first.waits
        assert second.waits
        assert ask(runner, 1, 0).result() == [1]
        assert (first.result(), second.result()) == ([0], [2])


def test_consumers_ahead_do_not_wait_for_lost_round() -> None:
    begins = [12, 11, 11, 12, 12]
    with running(5) as runner:
        answers = [ask(runner, consumer, round_) for consumer, round_ in enumerate(begins)]
        assert [answers[1].result(), answers[2].result()] == [[1], [2]]
        again = [ask(runner, 1, 12), ask(runner, 2, 12)]
        assert [each.result() for each in (answers[0], *again, answers[3], answers[4])] == [
            [5],
            [6],
            [7],
            [8],
            [9],
        ]
        assert [each.result() for each in ask_all(runner, 5, 13)] == [
            [each] for each in range(10, 15)
        ]


def test_skipped_round_is_skipped_by_all() -> None:
    with running(2) as runner:
        ahead = ask(runner, 0, 12, skipped=True)
        behind = ask(runner, 1, 11)
        assert behind.result() == Answer.SKIPPED
        assert behind.tag[0] == 12
        assert ask(runner, 1, 12).result() == [1]
        assert ahead.result() == [0]


def test_absent_consumer_skips_round_without_loss() -> None:
    with running(2) as runner:
        early = ask(runner, 0, 0)
        runner.expire(early)
        assert (early.result(), early.tag[0]) == (Answer.SKIPPED, 1)
        again = ask(runner, 0, 1)
        runner.expire(again)
        late = ask(runner, 1, 0)
        assert (late.result(), late.tag[0]) == (Answer.SKIPPED, 2)
        assert [each.result() for each in ask_all(runner, 2, 2)] == [[0], [1]]


def test_slow_pipeline_skips_round_for_all() -> None:
    gate = threading.Event()

    def slow(x: Any) -> Any:
        gate.wait()
        return x

    with running(
        2, Dataset.counter().map(slow, output_signature=Dataset.counter().element_spec)
    ) as runner:
        answers = ask_all(runner, 2, 0)
        runner.expire(answers[1])
        assert [each.result() for each in answers] == [Answer.SKIPPED] * 2
        gate.set()
        assert [each.result() for each in ask_all(runner, 2, 1)] == [[0], [1]]


def test_expiry_after_reply_changes_nothing() -> None:
    with running(1) as runner:
        answer = ask(runner, 0, 0)
        answer.result()
        runner.expire(answer)
        assert ask(runner, 0, 1).result() == [1]


def test_repeated_request_gets_same_reply() -> None:
    with running(2) as runner:
        assert [each.result() for each in ask_all(runner, 2, 0)] == [[0], [1]]
        again = ask(runner, 0, 0)
        assert (again.result(), again.tag[0]) == ([0], 1)
        assert [each.result() for each in ask_all(runner, 2, 1)] == [[2], [3]]


def test_new_reader_cannot_repeat_earlier_round() -> None:
    with running(2) as runner:
        for round_ in range(3):
            for answer in ask_all(runner, 2, round_):
                answer.result()
        with pytest.raises(
            FailedPreconditionError, match="but the current round has already reached 3"
        ):
            ask(runner, 0, 0, reader=2).result()


def test_reply_has_last_common_round() -> None:
    with running(2) as runner:
        for answer in ask_all(runner, 2, 0):
            answer.result()
            assert answer.tag == (1, -1)
        for answer in ask_all(runner, 2, 1):
            answer.result()
            assert answer.tag == (2, 0)


def test_ready_rounds_are_sent_together() -> None:
    with running(2) as runner:
        until_ready = [ask(runner, 0, 0), ask(runner, 1, 0)]
        for answer in until_ready:
            answer.result()
        until(
            lambda: TaskReport(*runner.figures()).buffered >= 4 * 2,
            "four groups that are made ahead",
        )
        first, second = ask(runner, 0, 1, rounds=4), ask(runner, 1, 1, rounds=3)
        assert (first.result(), second.result()) == ([2, 4, 6], [3, 5, 7])
        assert first.tag[0] == second.tag[0] == 4


def test_pipeline_error_persists() -> None:
    def fails(x: Any) -> Any:
        raise ValueError("spoiled")

    with running(
        2, Dataset.counter().map(fails, output_signature=Dataset.counter().element_spec)
    ) as runner:
        for round_ in (0, 0, 1):
            for answer in ask_all(runner, 2, round_):
                with pytest.raises(Exception, match="spoiled"):
                    answer.result()


def test_pipeline_end_is_lasting_error() -> None:
    with running(2, Dataset.range(5)) as runner:
        for round_ in range(2):
            for answer in ask_all(runner, 2, round_):
                answer.result()
        for _ in range(2):
            for answer in ask_all(runner, 2, 2):
                with pytest.raises(
                    FailedPreconditionError, match="end of sequence on a round-robin read iterator"
                ):
                    answer.result()


def test_newer_request_displaces_waiting_one() -> None:
    with running(2) as runner:
        older = ask(runner, 0, 0)
        newer = ask(runner, 0, 1)
        with pytest.raises(
            AbortedError, match="of consumer 0 for round 1 took the place of this one for round 0"
        ):
            older.result()
        runner.expire(older)  # its time is over after its answer: nothing is skipped
        assert newer.waits
        assert ask(runner, 1, 1).result() == [1]
        assert newer.result() == [0]


def test_shared_consumer_index_is_refused() -> None:
    with running(2) as runner:
        first = ask(runner, 0, 0, reader=1)
        second = ask(runner, 0, 0, reader=2)
        text = r"Another reader \(client 2\) requests round .* as consumer 0.*client 1.* waited .* two readers have the same consumer_index"
        with pytest.raises(FailedPreconditionError, match=text):
            first.result()
        assert ask(runner, 1, 0).result() == [1]
        assert second.result() == [0]


def test_stopped_task_fails_waiting_requests() -> None:
    with running(3) as runner:
        waiting = [ask(runner, 0, 0), ask(runner, 1, 0)]
    for answer in [*waiting, ask(runner, 2, 0)]:
        with pytest.raises(CancelledError):
            answer.result()


def test_unwanted_request_is_not_counted() -> None:
    with running(2) as runner:
        gone = ask(runner, 0, 0)
        gone.is_wanted = False
        other = ask(runner, 1, 0)
        assert other.waits
        assert ask(runner, 0, 0).result() == [0]
        assert other.result() == [1]


def test_unknown_consumer_index_is_refused() -> None:
    with (
        running(2) as runner,
        pytest.raises(FailedPreconditionError, match="Requesting data for consumer index 2"),
    ):
        ask(runner, 2, 0).result()


def test_groups_made_ahead_are_bounded_and_shown() -> None:
    with running(1, Dataset.counter()) as runner:
        for round_ in range(300):
            ask(runner, 0, round_).result()
            figures = TaskReport(*runner.figures())
            assert figures.elements == round_ + 1
            assert figures.buffered <= figures.room <= GROUPS_MAX
