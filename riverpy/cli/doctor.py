"""`riverpy doctor`: find problems, and show how to fix them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from riverpy._duration import format_duration
from riverpy._tools.doctor.check_runner import CheckRunner
from riverpy._tools.doctor.finding import LEVEL_NAMES, Finding, Level, worst_level
from riverpy._tools.doctor.snapshot import DoctorOptions, WorkerProgram
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import has_color, print_json, print_text
from riverpy.cli._run import EXIT_FAILURE, EXIT_WARNING, one_line, run, show_traceback
from riverpy.cli._target import load_target, open_target
from riverpy.cli._types import DURATION, URL

if TYPE_CHECKING:
    from riverpy.cli._options import DatabaseSettings
    from riverpy.cli._target import Target

STUCK_AFTER_DEFAULT = timedelta(minutes=10)
MAX_LAG_DEFAULT = timedelta(minutes=1)

_EXIT_CODES = {Level.OK: 0, Level.WARN: EXIT_WARNING, Level.FAIL: EXIT_FAILURE}
_COLORS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
_INDENT, _NAME_WIDTH = 6, 14
_WIDTH_MIN = 20


@click.command
@click.argument("target", metavar="[MODULE:ATTR]", required=False)
@click.option(
    "--listen-url",
    metavar="URL",
    type=URL,
    help="URL on which clients listen, if it is not the database URL. It is tested too.",
)
@click.option(
    "--stuck-after",
    type=DURATION,
    default=format_duration(STUCK_AFTER_DEFAULT),
    show_default=True,
    help="Report jobs that have run for longer.",
)
@click.option(
    "--max-lag",
    type=DURATION,
    default=format_duration(MAX_LAG_DEFAULT),
    show_default=True,
    help="Report queues with a job that has waited for longer.",
)
@click.option("--problems", is_flag=True, help="Show only problems.")
@json_option
@database_options
def doctor(
    database: DatabaseSettings,
    *,
    target: str | None,
    listen_url: str | None,
    stuck_after: timedelta,
    max_lag: timedelta,
    problems: bool,
    as_json: bool,
) -> None:
    """Find problems of the database and its clients, and show how to fix them.

    The command only reads, in short transactions, and sends one notification to itself. Exit codes:
    0 everything is ok, 5 there are warnings, 1 something fails. To accept warnings in a script:
    `riverpy doctor || [ $? -eq 5 ]`.

    With MODULE:ATTR, as for `riverpy worker`, it also finds waiting jobs of kinds for which this
    program has no worker. Check this before you deploy the program.
    """
    request = DoctorOptions(
        database.required_url(),
        database.schema,
        listen_url,
        stuck_after,
        max_lag,
        None if target is None else run(_read_program, load_target(target)),
    )
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not as_json and not (problems and finding.level is Level.OK):
            _print_finding(finding)

    run(CheckRunner(request, report, show_traceback).run)
    level = worst_level(findings)
    if as_json:
        shown = [one for one in findings if not (problems and one.level is Level.OK)]
        print_json({"level": level, "findings": shown})
    else:
        numbers = Counter(finding.level for finding in findings)
        worst_first = [one for one in reversed(Level) if numbers[one]]
        print_text(", ".join(f"{numbers[one]} {LEVEL_NAMES[one]}" for one in worst_first))
    raise click.exceptions.Exit(_EXIT_CODES[level])


async def _read_program(target: Target) -> WorkerProgram:
    async with open_target(target) as client:
        return WorkerProgram(target.spec, frozenset(client.workers or ()), frozenset(client.queues))


def _print_finding(finding: Finding) -> None:
    level = LEVEL_NAMES[finding.level].ljust(_INDENT)
    if has_color(sys.stdout):
        level = click.style(level, fg=_COLORS[finding.level])
    print_text(level + _wrap_text(f"{finding.name:<{_NAME_WIDTH}}", one_line(finding.text)))
    if finding.fix is not None:
        print_text(" " * _INDENT + _wrap_text("fix: ", one_line(finding.fix)))


def _wrap_text(label: str, text: str) -> str:
    """Wrap and indent a text if stdout is a terminal. Otherwise keep it in one line for `grep`."""
    if not sys.stdout.isatty():
        return label + text
    width = shutil.get_terminal_size().columns - _INDENT - len(label)
    lines = textwrap.wrap(text, max(width, _WIDTH_MIN), break_on_hyphens=False) or [""]
    return label + f"\n{'':<{_INDENT + len(label)}}".join(lines)
