"""mypy strict on user code: it accepts correct code, and its messages name the mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RIGHT, TESTS, WRONG = HERE / "user_code.py", HERE / "testing_code.py", HERE / "wrong_code.py"
SETTINGS = """
[mypy]
strict = true
follow_imports = silent

[mypy-django.*,markdown_it.*,opentelemetry.*,prometheus_client.*,rich.*,sentry_sdk.*]
follow_imports = skip
"""
"""mypy does not report errors of riverpy itself. It does not read packages whose types the user's
code does not name: half of all modules that riverpy imports."""
_ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*)  \[[\w-]+\]")
_FUNCTION = re.compile(r"(?:async )?def (\w+)\(")

ASYNC = "AsyncFunctionFromJobToOutput"
PLAIN = "PlainFunctionFromJobToOutput"
GIVEN = "Callable[[Job[Welcome]], Coroutine[Any, Any, None]]"
EXPECTED = {
    "not_async": (ASYNC, "Callable[[Job[Welcome]], None]"),
    "two_parameters": (ASYNC, "Callable[[Job[Welcome], int], Coroutine[Any, Any, None]]"),
    "returns_a_set": (ASYNC, "Callable[[Job[Welcome]], Coroutine[Any, Any, set[NoKind]]]"),
    "returns_a_generator": (ASYNC, "Coroutine[Any, Any, Iterator[int]]"),
    "returns_no_json": (ASYNC, "Coroutine[Any, Any, list[object]]"),
    "does_not_await": (ASYNC, "Coroutine[Any, Any, Coroutine[Any, Any, None]]"),
    "no_annotation": ("Function is missing a type annotation",),
    "takes_the_args": (ASYNC, "Callable[[Welcome], Coroutine[Any, Any, None]]"),
    "not_blocking_either": (PLAIN, GIVEN),
    "not_blocking": (PLAIN, GIVEN),
    "blocking_response": (PLAIN, "Callable[[Job[Welcome]], Response]"),
    "no_executor": ('matches argument type "str"',),
    "no_timedelta": ('matches argument type "int"',),
    "work": ('supertype defines the argument type as "Job[Welcome]"',),
}
"""mypy's message for each wrong handler: the expected type of the function, and the actual one."""


class Error(NamedTuple):
    """An error of mypy."""

    file: str
    line: int
    text: str


def find_errors(settings: Path) -> list[Error]:
    """Return the errors of mypy in both files. Its cache in this project makes the next run short.
    Runs at the same time would lock each other out of a cache in SQLite."""
    settings.write_text(SETTINGS, "utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            f"--config-file={settings}",
            "--no-sqlite-cache",
            RIGHT,
            TESTS,
            WRONG,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [_ERROR.fullmatch(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stdout + done.stderr
    return [Error(Path(one["file"]).name, int(one["line"]), one["text"]) for one in found if one]


@pytest.mark.timeout(300)
def test_user_code_and_wrong_handlers(tmp_path: Path) -> None:
    """mypy strict accepts a correct program and its tests without a cast. For each wrong handler it
    prints the expected type and the actual one."""
    errors = find_errors(tmp_path / "mypy.ini")
    assert [error for error in errors if error.file in (RIGHT.name, TESTS.name)] == []
    lines = WRONG.read_text("utf-8").splitlines()
    texts: dict[str, list[str]] = {}
    for error in errors:
        if error.file == WRONG.name:
            below = (_FUNCTION.match(line.strip()) for line in lines[error.line - 1 :])
            name = next((one[1] for one in below if one), "")
            texts.setdefault(name, []).append(error.text)
    for name, parts in EXPECTED.items():
        assert any(all(part in text for part in parts) for text in texts[name]), texts[name]
