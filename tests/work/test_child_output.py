"""The log of what jobs in processes write."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from riverpy._log_events import JOB_OUTPUT_DROPPED, JOB_WROTE_OUTPUT
from riverpy._work import child_output
from riverpy._work.child_output import LINE_BURST_MAX, LINE_SIZE_MAX, ChildOutputLogger
from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

END = b"0123456789abcdef"
"""The text that ends the output of a job."""


def log_output(write: Callable[[ChildOutputLogger, int], None]) -> None:
    """Let a function write to the pipe of two jobs, 1 and 2, and wait until all is logged."""
    read_end, write_end = os.pipe()
    output = ChildOutputLogger(os.fdopen(read_end, "rb"), END)
    output.add_next_job(1, "first")
    output.add_next_job(2, "second")
    try:
        write(output, write_end)
    finally:
        os.close(write_end)
    output.wait_until_all_logged(PATIENCE)


def test_each_line_has_its_job(log: list[Any]) -> None:
    """Lines belong to the running job, also if they are read after its end, cut anywhere, not
    ended, not UTF-8, or contain control characters. After the end of a job, lines belong to the
    last job."""
    text = b"one\n\ntwo\r\nhalf" + END + b"\n\xff\x1b[31m\tred\n" + END + b"\nlate\nlast"

    def write(output: ChildOutputLogger, pipe: int) -> None:
        output.log_startup_output(b"early")
        for start in range(0, len(text), 7):
            os.write(pipe, text[start : start + 7])

    log_output(write)
    assert [(one["line"], one["job_id"], one["kind"]) for one in log] == [
        ("early", 1, "first"),
        ("one", 1, "first"),
        ("", 1, "first"),
        ("two", 1, "first"),
        ("half", 1, "first"),
        ("\\xff\\x1b[31m\tred", 2, "second"),
        ("late", 2, "second"),
        ("last", 2, "second"),
    ]


def test_long_line(log: list[Any]) -> None:
    """A long line is cut, and the end of the job behind it is found."""

    def write(_output: ChildOutputLogger, pipe: int) -> None:
        os.write(pipe, b"a" * LINE_SIZE_MAX + b"\n")
        for _ in range(100):
            os.write(pipe, b"b" * LINE_SIZE_MAX)
        os.write(pipe, END + b"\nnext\n")

    log_output(write)
    found = [(one["line"], one["job_id"], one.get("is_cut", False)) for one in log]
    whole, cut = "a" * LINE_SIZE_MAX, "b" * LINE_SIZE_MAX
    assert found == [(whole, 1, False), (cut, 1, True), ("next", 2, False)]


def test_too_many_lines(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the limit are dropped and counted for their job. Lines of the next job are
    logged when the rate allows it again."""
    monkeypatch.setattr(child_output, "LINES_PER_SECOND_MAX", 0)

    def write(output: ChildOutputLogger, pipe: int) -> None:
        os.write(pipe, b"x\n" * (LINE_BURST_MAX + 5) + END + b"\ny\n" + END + b"\n")

    log_output(write)
    assert [one["event"] for one in log] == [JOB_WROTE_OUTPUT] * LINE_BURST_MAX + [
        JOB_OUTPUT_DROPPED
    ] * 2
    assert [(one["job_id"], one["lines"]) for one in log[LINE_BURST_MAX:]] == [(1, 5), (2, 1)]
