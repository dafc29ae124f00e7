"""The text of log lines, and structlog in the code of the user."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from riverpy.cli._log_text import LogEntryFormatter, LogRecordFormatter

PROGRAM = """
import logging, sys
from riverpy.cli._logging import configure_logging
configure_logging("json", "info", process_number=3)
from riverpy._log import get_logger
get_logger(client_id="me").info("before", n=1)
get_logger().debug("not written")
assert "structlog" not in sys.modules
import structlog
structlog.contextvars.bind_contextvars(request="r1")
log = structlog.get_logger("mine")
log.info("first", user="u")
log.debug("not written")
try:
    raise ValueError("postgres://u:secret@host/db")
except ValueError:
    log.exception("failed")
logging.getLogger("other").warning("line %d", 5)
get_logger(client_id="me").warning("after")
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stdout))
configure_logging("json", "info")
get_logger().info("as the user wants")
"""


def failure() -> Exception:
    """Return an exception with a traceback."""
    try:
        raise ValueError("no such order")
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({}, "T [info     ] jobs worked"),
        (
            {"b": "two words", "a": 1, "url": "postgres://u:secret@h/db", "empty": ""},
            "T [info     ] jobs worked  a=1 b='two words' empty= url=postgres://u:***@h/db",
        ),
        (
            {"logger": "mine", "k": "x", "stack": "Stack:\n  f"},
            "T [info     ] jobs worked                    [mine] k=x\nStack:\n  f",
        ),
        ({"trace": "Traceback:\n  f", "id": 5}, "T [info     ] jobs worked  id=5\nTraceback:\n  f"),
    ],
)
def test_columns(entry: dict[str, Any], line: str) -> None:
    """A line has time, level, event, logger and the other keys in order. Tracebacks and stacks
    follow on lines of their own. With colours the text is the same."""
    for has_colors in (False, True):
        text = LogEntryFormatter(is_json=False, has_colors=has_colors).format_entry(
            "info", {**entry, "event": "jobs worked"}
        )
        plain = re.sub("\x1b\\[[0-9]*m", "", text)
        assert (plain == text) is not has_colors
        plain = re.sub("(?m) +$", "", plain)
        assert re.sub(r"^\S+Z", "T", re.sub(" {2,}", "  ", plain)) == re.sub(" {2,}", "  ", line)


@pytest.mark.parametrize("exc_info", ["error", "tuple", True])
def test_json(exc_info: object) -> None:
    """A line is one JSON object. Values without a JSON form are written as Python shows them."""
    error = failure()
    given = {"error": error, "tuple": (type(error), error, error.__traceback__)}.get(
        str(exc_info), exc_info
    )
    entry = {"event": "failed", "type": int, "exc_info": given}
    try:
        raise error
    except ValueError:
        text = LogEntryFormatter(is_json=True, has_colors=False).format_entry("error", entry)
    found = json.loads(text)
    assert (found["event"], found["level"], found["type"]) == ("failed", "error", "<class 'int'>")
    assert found["exception"].startswith("Traceback (most recent call last):\n")
    assert found["exception"].endswith("ValueError: no such order")


def test_record() -> None:
    """A record of `logging` has its message, its logger and its traceback."""
    error = failure()
    record = logging.LogRecord(
        "mine",
        logging.WARNING,
        "f",
        1,
        "line %d",
        (5,),
        (type(error), error, error.__traceback__),
        sinfo="Stack:",
    )
    formatter = LogRecordFormatter(LogEntryFormatter(is_json=True, has_colors=False))
    found = json.loads(formatter.format(record))
    assert found.pop("timestamp")
    assert found.pop("exception").endswith("\nValueError: no such order")
    assert found == {
        "event": "line 5",
        "logger": "mine",
        "level": "warning",
        "stack": "Stack:",
    }


def test_structlog_of_the_user() -> None:
    """structlog is configured when the user's code imports it, after riverpy's first events. All
    lines have one form then. A configuration of the user is kept."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(line.pop("timestamp") and line.pop("process") == 3 for line in lines)
    assert lines[2].pop("exception").endswith("ValueError: postgres://u:***@host/db")
    assert lines == [
        {"client_id": "me", "n": 1, "event": "before", "level": "info"},
        {"user": "u", "event": "first", "request": "r1", "level": "info"},
        {"event": "failed", "request": "r1", "level": "error"},
        {"event": "line 5", "request": "r1", "logger": "other", "level": "warning"},
        {"client_id": "me", "event": "after", "request": "r1", "level": "warning"},
    ]
    assert '"event": "as the user wants"' in done.stdout
