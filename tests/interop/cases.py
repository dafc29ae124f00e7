"""The conformance cases for River's clients, CF-001 to CF-111, and the reasons why some of them
have no test.

A case with a test has its number in the test's docstring. All others are here, in one group.
`scripts/interop` prints the size of each group.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

CASES = set(range(1, 112))

LEFT_OUT = {
    64: "optional: job retention by queue is for River's extensions",
    78: "a soak of 5 minutes or more: scripts/chaos and scripts/soak, and the mixed fleet in short",
    86: "no test asserts speed: scripts/bench compare",
    89: "a soak of 5 minutes or more, as 78",
    90: "no test asserts speed: scripts/bench compare",
    91: "no test asserts speed: scripts/bench compare",
    92: "no test asserts speed: scripts/bench compare",
}
"""Cases that will have no test, with the reason."""

DIFFERENT = {
    36: "a server that refuses NOTIFY is not detected: settings say so, and cancels fail there",
    40: "an attempt that ignores its cancellation stays with a library client for the rescue",
    50: "a middleware that raises after the insert undoes nothing, where River rolls it back",
    57: "stuck jobs of a kind that the leader does not know are left alone, where River discards",
    61: "periodic jobs of a client with candidate=False are warned of, where River refuses them",
    65: "paused queues and those with metadata are kept, where River deletes them after a day",
    94: "max_attempts above 32,767 is refused, where River cuts it down",
    98: "a claim drops the mark of a cancel that an older River left, where River keeps it",
    101: "any exception leaves the steps in the row, where a panic of River leaves none",
}
"""Cases in which riverpy differs from River on purpose. Their tests show riverpy's rule; docs/go.md
describes it for users."""

_TESTS = Path(__file__).parents[1]
_CASE = re.compile(r"CF-(\d{3})\b")


@cache
def shown() -> set[int]:
    """Return the cases in the docstrings of tests."""
    texts = [path.read_text("utf-8") for path in _TESTS.rglob("test_*.py")]
    return {
        int(number)
        for text in texts
        if "CF-" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        for number in _CASE.findall(ast.get_docstring(node) or "")
    }


def summary() -> str:
    """Return the number of cases in each group, in one line."""
    return (
        f"{len(shown())} of {len(CASES)} cases of conformance have a test, for {len(DIFFERENT)} of "
        f"them riverpy's own rule; {len(LEFT_OUT)} are left out"
    )
