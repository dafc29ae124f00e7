"""docs/properties.md names exactly the numbers that tests carry, each beside its files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "properties.md"
_NUMBER = re.compile(r"\b(?:[A-Z]{2}-\d\d|P\d{1,2})\b")
_ROW = re.compile(r"^\| ([A-Z]{2}-\d\d|P\d{1,2}) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)


def numbers_of_tests() -> dict[str, set[str]]:
    """Each number in a test's docstring, and the files of those tests."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for number in _NUMBER.findall(ast.get_docstring(node) or ""):
                    found.setdefault(number, set()).add(path.relative_to(TESTS).as_posix())
    return found


def test_page_names_the_tests() -> None:
    """A number that a test gains or loses is gained or lost by the page."""
    rows = {
        number: set(re.findall(r"`([^`]+)`", files))
        for number, files in _ROW.findall(PAGE.read_text("utf-8"))
    }
    assert rows == numbers_of_tests()


def test_page_names_files_that_exist() -> None:
    """Each file on the page is there."""
    for name in re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", PAGE.read_text("utf-8")):
        assert (TESTS / name).exists(), name
