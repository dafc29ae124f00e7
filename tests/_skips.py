"""Prints at the end of a run that the tests with River in Go were skipped. The list of skips is
easy to overlook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

FOLDER = "tests/interop/"


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print the line."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if report.nodeid.startswith(FOLDER)
    ]
    if skipped:
        terminalreporter.write_sep(
            "=", f"NOT RUN: {len(skipped)} tests of Go and Python together", yellow=True, bold=True
        )
        terminalreporter.write_line(
            f"{FOLDER} needs Go 1.26 or newer, and River's modules from the module proxy."
        )
