"""How the bytes of a child become lines."""

from __future__ import annotations

import pytest

from zmqdist.limits import (
    LOG_BURST_LINES,
    LOG_BYTES_KEPT,
    LOG_LINE_BYTES_MAX,
    LOG_LINES_KEPT,
    LOG_LINES_PER_S,
)
from zmqdist.process.log_book import LATEST, STDERR, STDOUT, ChildOutput, LogBook

ALL = LOG_LINES_KEPT


@pytest.fixture
def book() -> LogBook:
    return LogBook(1e9)


@pytest.fixture
def output(book: LogBook) -> ChildOutput:
    return ChildOutput(book, "slot 0")


def texts(book: LogBook) -> list[str]:
    return [line.text for line in book.after(0, ALL)]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\nt", b"wo"], ["one", "two"]),
        ([b"no newline"], ["no newline"]),
        ([b"\n\n"], ["", ""]),
        ([b"\xff\x00\x80\n"], ["\ufffd\x00\ufffd"]),
        ([b"\x1b[31mred\x1b[0m\n"], ["\x1b[31mred\x1b[0m"]),
        ([b"10%\r", b"20%\r", b"done\r\n"], ["done"]),
        ([b"x" * (LOG_LINE_BYTES_MAX + 1)], ["x" * (LOG_LINE_BYTES_MAX - 3) + "..."]),
        (
            [b"x" * LOG_LINE_BYTES_MAX * 3, b"y" * 10, b"\nz\n"],
            ["x" * (LOG_LINE_BYTES_MAX - 3) + "...", "z"],
        ),
    ],
)
def test_bytes_become_lines(
    chunks: list[bytes], lines: list[str], book: LogBook, output: ChildOutput
) -> None:
    for chunk in chunks:
        assert output.feed(STDOUT, chunk, 1.0) is None
    output.end(1.0)
    assert texts(book) == lines


def test_line_has_number_time_process_and_stream(book: LogBook, output: ChildOutput) -> None:
    output.feed(STDERR, b"bad\n", 2.5)
    output.feed(STDOUT, b"good\n", 3.5)
    first, second = book.after(0, ALL)
    assert (first.number, first.at, first.process, first.stream) == (1, 1e9 + 2.5, "slot 0", STDERR)
    assert (second.number, second.stream) == (2, STDOUT)
    assert book.after(1, ALL) == [second]


def test_streams_are_cut_apart(book: LogBook, output: ChildOutput) -> None:
    output.feed(STDOUT, b"out", 1.0)
    output.feed(STDERR, b"err\n", 1.0)
    output.feed(STDOUT, b"put\n", 1.0)
    assert texts(book) == ["err", "output"]


def test_flood_is_counted_and_its_last_lines_are_kept(book: LogBook, output: ChildOutput) -> None:
    flood = b"".join(b"%d\n" % number for number in range(LOG_BURST_LINES + 1000))
    resume_at = output.feed(STDOUT, flood, 1.0)
    assert resume_at is not None
    assert book.last == LOG_BURST_LINES
    for _ in range(100):
        output.feed(STDOUT, b"more\n" * 1000, 1.0)
    output.feed(STDOUT, b"dying words\n", 1.0)
    output.end(1.0)
    assert texts(book)[LOG_BURST_LINES] == f"... {101_001 - LATEST:,} lines left out"
    assert texts(book)[-2:] == ["more", "dying words"]


def test_lines_pass_again_after_a_second(book: LogBook, output: ChildOutput) -> None:
    resume_at = output.feed(STDOUT, b"x\n" * (LOG_BURST_LINES + 100), 1.0)
    assert resume_at == pytest.approx(2.0)
    output.tick(resume_at)
    assert texts(book)[LOG_BURST_LINES] == f"... {100 - LATEST} lines left out"
    output.feed(STDOUT, b"y\n" * LOG_LINES_PER_S, resume_at)
    assert texts(book)[-1] == "y"


def test_short_flood_loses_nothing(book: LogBook, output: ChildOutput) -> None:
    output.feed(STDOUT, b"x\n" * (LOG_BURST_LINES + 3), 1.0)
    output.end(1.0)
    assert book.last == LOG_BURST_LINES + 3


def test_book_is_bounded_by_lines_and_characters(book: LogBook) -> None:
    for number in range(LOG_LINES_KEPT + 10):
        book.add("slot 0", STDOUT, str(number), 1.0)
    kept = book.after(0, LOG_LINES_KEPT + 10)
    assert (len(kept), kept[0].text) == (LOG_LINES_KEPT, "10")
    for _ in range(2000):
        book.add("slot 0", STDOUT, "x" * LOG_LINE_BYTES_MAX, 1.0)
    assert len(book.after(0, ALL)) <= LOG_BYTES_KEPT // LOG_LINE_BYTES_MAX
