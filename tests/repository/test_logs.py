"""docs/logs.md names every sentence that riverpy logs, with its keys, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "logs.md"
LEVELS = {"debug", "info", "warning", "error", "exception"}
_ROW = re.compile(r"^\| (.+?) \| [a-z, ]+ \| (.*?) ?\|$", re.MULTILINE)
_UNSHOWN = {"exc_info"}


def logged(tree: ast.AST) -> dict[str, set[str]]:
    """The sentences that a module logs, each with its keys. `say` is how a line is called whose
    level depends; `_drop` logs the first item that a stream drops."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function = node.func
        name = getattr(function, "attr", None) or getattr(function, "id", "")
        keys = {key.arg for key in node.keywords if key.arg} - _UNSHOWN
        if name in LEVELS and isinstance(function, ast.Attribute):
            if "log" not in ast.unparse(function.value):
                continue
        elif name == "_drop":
            keys = {"size"}
        elif name != "say":
            continue
        first = node.args[0]
        texts = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
        for text in texts:
            if isinstance(text, ast.Constant):
                found.setdefault(str(text.value), set()).update(keys)
    return found


def sentences() -> dict[str, set[str]]:
    """All that riverpy logs."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "riverpy").rglob("*.py"):
        for text, keys in logged(ast.parse(path.read_text("utf-8"))).items():
            found.setdefault(text, set()).update(keys)
    return found


def test_page_names_the_sentences() -> None:
    """A sentence or a key that the log gains or loses is gained or lost by the page."""
    rows = {
        text: set(re.findall(r"`(\w+)`", keys))
        for text, keys in _ROW.findall(PAGE.read_text("utf-8"))
        if text != "sentence"
    }
    assert rows == sentences()


def test_each_line_is_one_line() -> None:
    """No key is one that the console shows below its line, as it does tracebacks."""
    assert not {key for keys in sentences().values() for key in keys} & {"exception", "stack"}


def test_reader_can_fail() -> None:
    """The reader of the sources sees a line of each form."""
    tree = ast.parse(
        "self._log.info('a', x=1)\n"
        "log.warning('b' if c else 'd')\n"
        "say('e', **f)\n"
        "self._drop('g')\n"
        "response.error('h')\n"
    )
    assert logged(tree) == {"a": {"x"}, "b": set(), "d": set(), "e": set(), "g": {"size"}}
