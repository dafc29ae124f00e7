"""`riverpy doctor`: find problems, and show how to fix them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import click

from riverpy._duration import format_duration
from riverpy._tools.doctor.check_runner import CheckRunner
from riverpy._tools.doctor.finding import LEVEL_NAMES, Finding, Level, worst_level
from riverpy._tools.doctor.snapshot import (
    LEASE_LAG_AGE_MAX_DEFAULT,
    QUEUE_LAG_MAX_DEFAULT,
    STUCK_JOB_AGE_DEFAULT,
    DoctorOptions,
    WorkerProgram,
)
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import print_json, print_text, should_use_color
from riverpy.cli._run import (
    EXIT_FAILURE,
    EXIT_WARNING,
    print_traceback_if_debug,
    run_async,
    text_to_one_line,
)
from riverpy.cli._target import load_client_target, open_client
from riverpy.cli._types import DURATION_TYPE, URL_TYPE

if TYPE_CHECKING:
    from datetime import timedelta

    from riverpy.cli._options import DatabaseSettings
    from riverpy.cli._target import ClientTarget

_EXIT_CODE_BY_LEVEL = {Level.OK: 0, Level.WARN: EXIT_WARNING, Level.FAIL: EXIT_FAILURE}
_COLOR_BY_LEVEL = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
_INDENT, _NAME_WIDTH = 6, 14
_TEXT_WIDTH_MIN = 20


@click.command
@click.argument("target", metavar="[MODULE:ATTR]", required=False)
@click.option(
    "--listen-url",
    metavar="URL",
    type=URL_TYPE,
    help="URL on which clients listen, if it is not the database URL. It is tested too.",
)
@click.option(
    "--stuck-after",
    type=DURATION_TYPE,
    default=format_duration(STUCK_JOB_AGE_DEFAULT),
    show_default=True,
    help="Report jobs that have run for longer.",
)
@click.option(
    "--max-lag",
    type=DURATION_TYPE,
    default=format_duration(QUEUE_LAG_MAX_DEFAULT),
    show_default=True,
    help="Report queues with a job that has waited for longer.",
)
@click.option(
    "--max-lag-age",
    type=DURATION_TYPE,
    default=format_duration(LEASE_LAG_AGE_MAX_DEFAULT),
    show_default=True,
    help="Report leases whose holder has not handled an item for longer.",
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
    max_lag_age: timedelta,
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
        database.require_url(),
        database.schema,
        listen_url,
        stuck_after,
        max_lag,
        max_lag_age,
        None if target is None else run_async(_load_worker_program, load_client_target(target)),
    )
    findings: list[Finding] = []

    def report_finding(finding: Finding) -> None:
        findings.append(finding)
        if not as_json and not (problems and finding.level is Level.OK):
            _print_finding(finding)

    run_async(CheckRunner(request, report_finding, print_traceback_if_debug).run)
    level = worst_level(findings)
    if as_json:
        shown = [one for one in findings if not (problems and one.level is Level.OK)]
        print_json({"level": level, "findings": shown})
    else:
        numbers = Counter(finding.level for finding in findings)
        worst_first = [one for one in reversed(Level) if numbers[one]]
        print_text(", ".join(f"{numbers[one]} {LEVEL_NAMES[one]}" for one in worst_first))
    raise click.exceptions.Exit(_EXIT_CODE_BY_LEVEL[level])


async def _load_worker_program(target: ClientTarget) -> WorkerProgram:
    """Open the client of `target`. Return its import path, its kinds and its queues."""
    async with open_client(target) as client:
        kinds, queues = frozenset(client.workers or ()), frozenset(client.queues)
        return WorkerProgram(target.import_path, kinds, queues)


def _print_finding(finding: Finding) -> None:
    level = LEVEL_NAMES[finding.level].ljust(_INDENT)
    if should_use_color(sys.stdout):
        level = click.style(level, fg=_COLOR_BY_LEVEL[finding.level])
    print_text(level + _wrap_text(f"{finding.name:<{_NAME_WIDTH}}", text_to_one_line(finding.text)))
    if finding.fix is not None:
        print_text(" " * _INDENT + _wrap_text("fix: ", text_to_one_line(finding.fix)))


def _wrap_text(label: str, text: str) -> str:
    """Return the label and the text. On a terminal, the text is wrapped and indented; otherwise it
    stays on one line, so that `grep` can find it."""
    if not sys.stdout.isatty():
        return label + text
    width = shutil.get_terminal_size().columns - _INDENT - len(label)
    lines = textwrap.wrap(text, max(width, _TEXT_WIDTH_MIN), break_on_hyphens=False) or [""]
    return label + f"\n{'':<{_INDENT + len(label)}}".join(lines)
