"""`riverpy migrate`: make, update, check and print River's tables."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING

import click
import msgspec

from riverpy._db.schema import MAIN_LINE, lines, migrations
from riverpy.cli._options import database_options
from riverpy.cli._output import print_json, print_note, print_table
from riverpy.cli._run import EXIT_FAILURE, run
from riverpy.cli._types import DURATION
from riverpy.migrate import Direction, Migrator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy.cli._options import DatabaseSettings
    from riverpy.migrate import MigrationStep

_line_option = click.option(
    "--line",
    type=click.Choice(lines()),
    default=MAIN_LINE,
    show_default=True,
    help="Which sequence of migrations.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class _StepOptions(msgspec.Struct, frozen=True):
    """What `up` and `down` are asked to do."""

    line: str
    target: int | None
    max_steps: int | None
    dry_run: bool
    show_sql: bool
    as_json: bool
    lock_timeout: timedelta
    statement_timeout: timedelta


def _step_options(command: Callable[[DatabaseSettings, _StepOptions], None]) -> Callable[..., None]:
    """Add the options that `up` and `down` share; pass `database` and `options: _StepOptions`."""

    @wraps(command)
    def with_options(database: DatabaseSettings, **values: object) -> None:
        command(database, msgspec.convert(values, _StepOptions, builtin_types=(timedelta,)))

    wrapped: Callable[..., None] = with_options
    for option in (
        database_options,
        _json_option,
        click.option(
            "--statement-timeout",
            type=DURATION,
            default="1m",
            show_default=True,
            help="How long one statement may run.",
        ),
        click.option(
            "--lock-timeout",
            type=DURATION,
            default="4s",
            show_default=True,
            help="How long a statement may wait for a table that another transaction holds.",
        ),
        click.option("--show-sql", is_flag=True, help="Print the SQL of each migration."),
        click.option("--dry-run", is_flag=True, help="Change nothing, say what would be done."),
        click.option("--max-steps", type=click.IntRange(min=0), help="Migrate at most N versions."),
        _line_option,
    ):
        wrapped = option(wrapped)
    return wrapped


@click.group
def migrate() -> None:
    """Make, update and check River's tables."""


@migrate.command
@click.option("--to", "target", type=click.IntRange(min=1), help="Last version to apply.")
@_step_options
def up(database: DatabaseSettings, options: _StepOptions) -> None:
    """Apply the migrations that are outstanding.

    Each runs in its own transaction and is recorded in it. If one fails, those before it stay
    applied: run the command again to go on.
    """
    _migrate(Direction.UP, database, options)


@migrate.command
@click.option(
    "--to",
    "target",
    type=click.IntRange(min=0),
    help="Version to end at, which stays applied; 0 removes everything. Default: one step.",
)
@_step_options
def down(database: DatabaseSettings, options: _StepOptions) -> None:
    """Undo migrations: one, or those above --to. This drops tables, and the jobs in them."""
    _migrate(Direction.DOWN, database, options)


def _check_version(line: str, version: int | None, option: str) -> None:
    known = migrations(line)
    if version and version not in known:
        raise click.BadParameter(
            f"line {line!r} has no version {version}: riverpy knows 1 to {max(known)}",
            param_hint=option,
        )


def _migrate(direction: Direction, database: DatabaseSettings, options: _StepOptions) -> None:
    _check_version(options.line, options.target, "--to")
    migrator = Migrator(
        database.required_url(),
        schema=database.schema,
        line=options.line,
        lock_timeout=options.lock_timeout,
        statement_timeout=options.statement_timeout,
    )
    verb = migrator.up if direction is Direction.UP else migrator.down

    async def migrate_now() -> None:
        result = await verb(
            target=options.target, max_steps=options.max_steps, dry_run=options.dry_run
        )
        if options.as_json:
            print_json(
                {
                    "line": options.line,
                    "schema": result.schema,
                    "direction": direction,
                    "dry_run": options.dry_run,
                    "migrations": [
                        _step_json(step, show_sql=options.show_sql) for step in result.steps
                    ],
                    "notices": result.notices,
                }
            )
            return
        _print_steps(direction, result.steps, options)
        for notice in result.notices:
            print_note(notice)

    run(migrate_now)


def _step_json(step: MigrationStep, *, show_sql: bool) -> dict[str, object]:
    milliseconds = round(step.duration / timedelta(milliseconds=1), 3)
    entry: dict[str, object] = {
        "version": step.version,
        "name": step.name,
        "duration_ms": milliseconds,
    }
    return {**entry, "sql": step.sql} if show_sql else entry


def _print_steps(
    direction: Direction, steps: Sequence[MigrationStep], options: _StepOptions
) -> None:
    done = "applied" if direction is Direction.UP else "undone"
    for step in steps:
        what = f"{options.line} {step.version:03} {direction} {step.name}"
        if options.dry_run:
            click.echo(f"would be {done}: {what}")
        else:
            click.echo(f"{done}: {what} ({step.duration / timedelta(milliseconds=1):.0f} ms)")
        if options.show_sql:
            click.echo(step.sql)
    if not steps:
        click.echo(f"nothing to migrate {direction}")


@migrate.command("list")
@_line_option
@_json_option
@database_options
def list_(database: DatabaseSettings, *, line: str, as_json: bool) -> None:
    """List the versions of a line, and when each was applied."""
    migrator = Migrator(database.required_url(), schema=database.schema, line=line)
    statuses = run(migrator.list)
    if as_json:
        print_json({"line": line, "migrations": statuses})
        return
    print_table(
        ("VERSION", "NAME", "APPLIED AT"),
        [
            (
                status.version,
                status.name or "(unknown to this riverpy)",
                status.applied_at and status.applied_at.isoformat(timespec="seconds"),
            )
            for status in statuses
        ],
    )


@migrate.command
@click.option("--to", "target", type=click.IntRange(min=1), help="Check up to this version.")
@_line_option
@_json_option
@database_options
def validate(database: DatabaseSettings, *, target: int | None, line: str, as_json: bool) -> None:
    """Check that no migration is missing. Exit code 1 if one is."""
    _check_version(line, target, "--to")
    migrator = Migrator(database.required_url(), schema=database.schema, line=line)

    async def validate_now() -> bool:
        result = await migrator.validate(target=target)
        if as_json:
            print_json({"line": line, **msgspec.to_builtins(result)})
        else:
            for message in result.messages:
                print_note(message)
            if result.ok:
                click.echo(f"line {line} is complete")
        return result.ok

    if not run(validate_now):
        sys.exit(EXIT_FAILURE)


@migrate.command
@click.option(
    "--version",
    "versions",
    type=click.IntRange(min=1),
    multiple=True,
    help="Only this one; repeatable.",
)
@click.option("--down", "is_down", is_flag=True, help="The way back, newest first.")
@_line_option
@database_options
def sql(database: DatabaseSettings, *, versions: tuple[int, ...], is_down: bool, line: str) -> None:
    """Print migrations as SQL for another tool to run. Uses no database.

    The SQL must not be wrapped in one transaction: commit after each version.
    """
    for version in versions:
        _check_version(line, version, "--version")
    direction = Direction.DOWN if is_down else Direction.UP
    text = Migrator.sql(
        line=line, versions=versions or None, direction=direction, schema=database.schema
    )
    click.echo(text, nl=False)
