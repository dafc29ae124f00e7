"""`riverpy doctor`: find what is wrong, and say what to do."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import click
import msgspec

from riverpy._dsn import mask_url, validate_url
from riverpy._duration import format_duration
from riverpy._tools.doctor.check_runner import CheckRunner, Request
from riverpy._tools.doctor.finding import LEVEL_NAMES, Finding, Level, worst_level
from riverpy._tools.doctor.program import Program
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import has_color, print_json, print_text
from riverpy.cli._run import EXIT_FAILURE, EXIT_WARNING, one_line, run, show_traceback
from riverpy.cli._target import entered, load
from riverpy.cli._types import DURATION

if TYPE_CHECKING:
    from riverpy.cli._options import DatabaseSettings

STUCK_AFTER_DEFAULT = timedelta(minutes=10)
MAX_LAG_DEFAULT = timedelta(minutes=1)

_EXIT_CODES = {Level.OK: 0, Level.WARN: EXIT_WARNING, Level.FAIL: EXIT_FAILURE}
_COLORS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
_INDENT, _NAME_WIDTH = 6, 14
_WIDTH_LEAST = 20


class DoctorOutput(msgspec.Struct, frozen=True):
    """Everything that was found, as `--json` prints it."""

    level: Level
    """The worst of all."""
    findings: list[Finding]


def _listen_url(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            validate_url(value)
    except ValueError as error:
        raise click.BadParameter(mask_url(str(error)), ctx, param) from None
    return value


@click.command
@click.argument("target", metavar="[MODULE:ATTR]", required=False)
@click.option(
    "--listen-url",
    metavar="URL",
    callback=_listen_url,
    help="Where clients listen, if not on the database URL: tried as they use it.",
)
@click.option(
    "--stuck-after",
    type=DURATION,
    default=format_duration(STUCK_AFTER_DEFAULT),
    show_default=True,
    help="Report jobs that run for longer.",
)
@click.option(
    "--max-lag",
    type=DURATION,
    default=format_duration(MAX_LAG_DEFAULT),
    show_default=True,
    help="Report queues with a job that is due for longer.",
)
@click.option("--problems", is_flag=True, help="Show only what is not ok.")
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
    """Find what is wrong with the database and the clients on it, and say what to do.

    Reads only, in short transactions, and sends one notification to itself. Exit code: 0 if all is
    ok, 5 if the worst is a warning, 1 if something fails. A script that lets warnings pass:
    `riverpy doctor || [ $? -eq 5 ]`.

    With MODULE:ATTR, as `riverpy worker` takes it, also: whether jobs wait of a kind that this
    program lacks, before it is deployed.
    """
    request = Request(
        database.required_url(),
        database.schema,
        listen_url,
        stuck_after,
        max_lag,
        None if target is None else run(_program, target, load(target)),
    )
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not as_json and not (problems and finding.level is Level.OK):
            _show(finding)

    run(CheckRunner(request, report, show_traceback).run)
    level = worst_level(findings)
    if as_json:
        told = [one for one in findings if not (problems and one.level is Level.OK)]
        print_json(DoctorOutput(level, told))
    else:
        print_text(_sum(findings))
    raise click.exceptions.Exit(_EXIT_CODES[level])


async def _program(spec: str, target: object) -> Program:
    async with entered(spec, target) as client:
        return Program(spec, frozenset(client.workers or ()), frozenset(client.queues))


def _show(finding: Finding) -> None:
    level = LEVEL_NAMES[finding.level].ljust(_INDENT)
    if has_color(sys.stdout):
        level = click.style(level, fg=_COLORS[finding.level])
    print_text(level + _wrapped(f"{finding.name:<{_NAME_WIDTH}}", one_line(finding.text)))
    if finding.fix is not None:
        print_text(" " * _INDENT + _wrapped("fix: ", one_line(finding.fix)))


def _wrapped(label: str, text: str) -> str:
    """On a terminal broken between words, each further line below the first; elsewhere one line,
    for who searches it."""
    if not sys.stdout.isatty():
        return label + text
    width = shutil.get_terminal_size().columns - _INDENT - len(label)
    lines = textwrap.wrap(text, max(width, _WIDTH_LEAST), break_on_hyphens=False) or [""]
    return label + f"\n{'':<{_INDENT + len(label)}}".join(lines)


def _sum(findings: list[Finding]) -> str:
    """How many there are of each level, the worst first."""
    numbers = Counter(finding.level for finding in findings)
    return ", ".join(
        f"{numbers[level]} {LEVEL_NAMES[level]}" for level in reversed(Level) if numbers[level]
    )
