"""Holds docs/logs.md, the constants of log events and the calls that log against each other."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from riverpy import _log_events

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "logs.md"
LEVELS = {"debug", "info", "warning", "error", "exception"}
EVENTS: dict[str, str] = {name: text for name, text in vars(_log_events).items() if name.isupper()}
WORDS_MAX = 6
_ROW = re.compile(r"^\| ([^|]+) \| ([a-z, ]+) \| (.*?) ?\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_UNSHOWN = {"exc_info"}
"""Keys that hold a traceback, which no page needs to list."""
_SETTINGS = {"level", "cause", "is_cause_logged"}
"""Arguments of `RepeatedFailureLog.failed` that are no keys of its event."""


@dataclass
class Usage:
    """How calls log one event."""

    keys: set[str] = field(default_factory=set)
    levels: set[str] = field(default_factory=set)
    """The levels of calls that name their level. Other calls leave it to a helper."""
    has_more_keys: bool = False
    """Whether a call also passes keys as `**keys`."""

    def add(self, call: ast.Call, method: str) -> None:
        """Add a call."""
        values = {key.arg: key.value for key in call.keywords if key.arg}
        self.has_more_keys |= len(values) < len(call.keywords)
        self.keys |= values.keys() - _UNSHOWN
        if method in LEVELS:
            self.levels.add("error" if method == "exception" else method)
        elif method == "log_failure":
            self.keys -= _SETTINGS
            self.levels.add("debug")
            if isinstance(level := values.get("level", ast.Constant("warning")), ast.Constant):
                self.levels.add(str(level.value))
        elif method == "log_recovery":
            self.levels.add("info")


def read_calls(tree: ast.AST) -> tuple[dict[str, Usage], list[str]]:
    """Return the usage of each constant that a module logs, and the texts that it logs without."""
    usages: dict[str, Usage] = {}
    literals: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        method = getattr(node.func, "attr", "")
        first = node.args[0]
        for event in (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,):
            if isinstance(event, ast.Name) and event.id in EVENTS:
                usages.setdefault(event.id, Usage()).add(node, method)
            elif method in LEVELS and "log" in ast.unparse(node.func):
                literals += [str(event.value)] if isinstance(event, ast.Constant) else []
    return usages, literals


@cache
def read_package() -> tuple[dict[str, Usage], list[str]]:
    """Return what `read_calls` finds in the whole package."""
    usages: dict[str, Usage] = {}
    literals: list[str] = []
    for path in (ROOT / "riverpy").rglob("*.py"):
        found, texts = read_calls(ast.parse(path.read_text("utf-8")))
        literals += texts
        for name, usage in found.items():
            total = usages.setdefault(name, Usage())
            total.keys |= usage.keys
            total.levels |= usage.levels
            total.has_more_keys |= usage.has_more_keys
    return usages, literals


def read_page() -> dict[str, tuple[set[str], set[str]]]:
    """Return the levels and keys of each event that the page lists."""
    return {
        event: (set(levels.split(", ")), set(re.findall(r"`(\w+)`", keys)))
        for event, levels, keys, _meaning, _remedy in _ROW.findall(PAGE.read_text("utf-8"))
        if event != "event"
    }


def test_events_are_constants() -> None:
    """Each call logs an event by its constant, and each constant is used."""
    usages, literals = read_package()
    assert literals == []
    assert set(EVENTS) - set(usages) == set()


def test_names_of_constants() -> None:
    """A constant is named as its event reads, and an event is a short phrase."""
    for name, text in EVENTS.items():
        assert re.sub(r"[ -]", "_", text).upper() == name
        assert len(text.split()) <= WORDS_MAX, text
    assert len(set(EVENTS.values())) == len(EVENTS)


def test_page_lists_the_events() -> None:
    """The page lists each event with its levels and keys, and no other event or key."""
    page, (usages, _) = read_page(), read_package()
    assert set(page) == set(EVENTS.values())
    for name, usage in usages.items():
        levels, keys = page[EVENTS[name]]
        assert usage.levels <= levels, name
        assert usage.keys <= keys, name
        assert usage.has_more_keys or usage.keys == keys, name


def test_each_line_is_one_line() -> None:
    """No key has a name whose value the console prints below the line, as it does tracebacks."""
    usages, _ = read_package()
    assert not {key for usage in usages.values() for key in usage.keys} & {"exception", "stack"}


def test_reader_can_fail() -> None:
    """The reader of the sources finds calls of each form, and literal texts."""
    tree = ast.parse(
        "self._log.info(JOB_STARTED, x=1)\n"
        "log.warning(QUEUE_PAUSED if c else QUEUE_RESUMED, **more)\n"
        "failures.log_failure(JOB_FAILED, level='error', y=2, exc_info=error)\n"
        "failures.log_recovery(JOB_ENDED)\n"
        "log.error('a text')\n"
        "response.error('h')\n"
    )
    usages, literals = read_calls(tree)
    assert usages == {
        "JOB_STARTED": Usage({"x"}, {"info"}),
        "QUEUE_PAUSED": Usage(set(), {"warning"}, has_more_keys=True),
        "QUEUE_RESUMED": Usage(set(), {"warning"}, has_more_keys=True),
        "JOB_FAILED": Usage({"y"}, {"debug", "error"}),
        "JOB_ENDED": Usage(set(), {"info"}),
    }
    assert literals == ["a text"]
