"""`riverpy migrate`: create, update and check the tables of River and riverpy, and print the SQL of
migrations."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
import msgspec

from riverpy._postgres.schema import MAIN_MIGRATION_LINE, list_migration_lines, load_migrations
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import print_json, print_note, print_table
from riverpy.cli._run import EXIT_FAILURE, run_async
from riverpy.cli._types import DURATION_TYPE, IntegerType
from riverpy.migrate import Direction, Migrator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy.cli._options import DatabaseSettings
    from riverpy.migrate import MigrateResult, MigrationStatus, MigrationStep

_migration_line_option = click.option(
    "--line",
    type=click.Choice(list_migration_lines()),
    help="Line of migrations: `main` for River's tables, `riverpy` for riverpy's own.",
)


def _add_migration_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with the options that the commands `up` and `down` have in common."""
    for option in (
        database_options,
        json_option,
        click.option(
            "--statement-timeout",
            type=DURATION_TYPE,
            default="1m",
            show_default=True,
            help="How long one statement may run.",
        ),
        click.option(
            "--lock-timeout",
            type=DURATION_TYPE,
            default="4s",
            show_default=True,
            help="How long a statement may wait for a lock of another transaction.",
        ),
        click.option("--show-sql", is_flag=True, help="Print the SQL of each migration."),
        click.option(
            "--dry-run", is_flag=True, help="Print what would be done, and change nothing."
        ),
        click.option("--max-steps", type=IntegerType(min=0), help="Migrate at most N versions."),
        _migration_line_option,
    ):
        command = option(command)
    return command


@click.group
def migrate() -> None:
    """Create, update and check the tables of River and riverpy."""


def _choose_migration_lines(line_name: str | None, *, is_single_line: bool) -> Sequence[str]:
    """Return the names of the migration lines to use, which are `main` and `riverpy`. With the
    option `--line`, return only that line. Without it, return both lines, or only `main` if
    `is_single_line` is True."""
    if line_name is not None:
        return (line_name,)
    return (MAIN_MIGRATION_LINE,) if is_single_line else list_migration_lines()


def _print_migration_lines_as_json(line_objects: Sequence[dict[str, object]]) -> None:
    """Print the JSON objects of one or more migration lines (`main` and `riverpy`). The object of a
    single migration line is printed as it is. Several objects are printed as one object with the
    key `lines`."""
    print_json(line_objects[0] if len(line_objects) == 1 else {"lines": line_objects})


@migrate.command
@click.option("--to", "target", type=IntegerType(min=1), help="Last version to apply.")
@_add_migration_options
def up(**options: Any) -> None:
    """Apply missing migrations.

    The migrations of the migration line `main` (River's tables) run first, then those of the line
    `riverpy`. With --to or --max-steps, only one line is used: that of --line, or `main`. Each
    migration runs in its own transaction. If one fails, the earlier ones stay applied. Run the
    command again to continue.
    """
    _run_migrations(Direction.UP, **options)


@migrate.command
@click.option(
    "--to",
    "target",
    type=IntegerType(min=0),
    help="Last version that stays applied; 0 removes everything. Default: one step.",
)
@_add_migration_options
def down(**options: Any) -> None:
    """Undo the last migration, or all migrations above --to.

    Without --line, this undoes migrations of the migration line `main`, which drops tables and the
    jobs in them.
    """
    _run_migrations(Direction.DOWN, **options)


def _check_version_exists(line_name: str, version: int | None, option_name: str) -> None:
    known = load_migrations(line_name)
    if version and version not in known:
        raise click.BadParameter(
            f"line {line_name!r} has no version {version}: riverpy knows 1 to {max(known)}",
            param_hint=option_name,
        )


def _run_migrations(
    direction: Direction,
    *,
    database: DatabaseSettings,
    line: str | None,
    target: int | None,
    max_steps: int | None,
    dry_run: bool,
    show_sql: bool,
    as_json: bool,
    **timeouts: timedelta,
) -> None:
    is_single_line = direction is Direction.DOWN or target is not None or max_steps is not None
    chosen = _choose_migration_lines(line, is_single_line=is_single_line)
    _check_version_exists(chosen[0], target, "--to")
    url = database.require_url()

    async def run_migrations() -> None:
        results: list[MigrateResult] = []
        for one in chosen:
            migrator = Migrator(url, schema=database.schema, line=one, **timeouts)
            verb = migrator.up if direction is Direction.UP else migrator.down
            result = await verb(target=target, max_steps=max_steps, dry_run=dry_run)
            results.append(result)
            if not as_json:
                _print_steps(result.line, result.steps, dry_run=dry_run, show_sql=show_sql)
        if as_json:
            _print_migration_lines_as_json(
                [
                    {
                        "line": result.line,
                        "schema": result.schema,
                        "direction": direction,
                        "dry_run": dry_run,
                        "migrations": [
                            _step_to_json_object(one, show_sql=show_sql) for one in result.steps
                        ],
                        "notices": result.notices,
                    }
                    for result in results
                ]
            )
            return
        if not any(result.steps for result in results):
            click.echo(f"nothing to migrate {direction}")
        for notice in dict.fromkeys(notice for result in results for notice in result.notices):
            print_note(notice)

    run_async(run_migrations)


def _step_to_json_object(step: MigrationStep, show_sql: bool) -> dict[str, object]:
    milliseconds = round(step.duration / timedelta(milliseconds=1), 3)
    sql = {"sql": step.sql} if show_sql else {}
    return {"version": step.version, "name": step.name, "duration_ms": milliseconds, **sql}


def _print_steps(
    line_name: str, steps: Sequence[MigrationStep], *, dry_run: bool, show_sql: bool
) -> None:
    for step in steps:
        done = "applied" if step.direction is Direction.UP else "undone"
        what = f"{line_name} {step.version:03} {step.direction} {step.name}"
        if dry_run:
            click.echo(f"would be {done}: {what}")
        else:
            click.echo(f"{done}: {what} ({step.duration / timedelta(milliseconds=1):.0f} ms)")
        if show_sql:
            click.echo(step.sql)


@migrate.command("list")
@_migration_line_option
@json_option
@database_options
def list_(database: DatabaseSettings, *, line: str | None, as_json: bool) -> None:
    """List migrations, and when each was applied."""
    url = database.require_url()
    chosen = _choose_migration_lines(line, is_single_line=False)

    async def read_line_statuses() -> list[Sequence[MigrationStatus]]:
        return [await Migrator(url, schema=database.schema, line=one).list() for one in chosen]

    found = dict(zip(chosen, run_async(read_line_statuses), strict=True))
    if as_json:
        _print_migration_lines_as_json([{"line": one, "migrations": found[one]} for one in chosen])
        return
    print_table(
        ("LINE", "VERSION", "NAME", "APPLIED AT"),
        [
            (
                one,
                status.version,
                status.name or "(unknown to this riverpy)",
                status.applied_at and status.applied_at.isoformat(timespec="seconds"),
            )
            for one in chosen
            for status in found[one]
        ],
    )


@migrate.command
@click.option(
    "--to",
    "target",
    type=IntegerType(min=1),
    help="Check only up to this version of one line: --line, or else `main`.",
)
@_migration_line_option
@json_option
@database_options
def validate(
    database: DatabaseSettings, *, target: int | None, line: str | None, as_json: bool
) -> None:
    """Check that all migrations are applied. The exit code is 1 if one is missing."""
    chosen = _choose_migration_lines(line, is_single_line=target is not None)
    _check_version_exists(chosen[0], target, "--to")
    url = database.require_url()

    async def validate_lines() -> bool:
        results = {
            one: await Migrator(url, schema=database.schema, line=one).validate(target=target)
            for one in chosen
        }
        if as_json:
            _print_migration_lines_as_json(
                [{"line": one, **msgspec.to_builtins(result)} for one, result in results.items()]
            )
        else:
            for message in dict.fromkeys(m for result in results.values() for m in result.messages):
                print_note(message)
            for one, result in results.items():
                if result.ok:
                    click.echo(f"line {one} is complete")
        return all(result.ok for result in results.values())

    if not run_async(validate_lines):
        sys.exit(EXIT_FAILURE)


@migrate.command
@click.option(
    "--version",
    "versions",
    type=IntegerType(min=1),
    multiple=True,
    help="Print only this version of one line: --line, or else `main`. Can be repeated.",
)
@click.option(
    "--down",
    "is_down",
    is_flag=True,
    help="Print the SQL that undoes migrations, the newest first.",
)
@_migration_line_option
@database_options
def sql(
    database: DatabaseSettings, *, versions: tuple[int, ...], is_down: bool, line: str | None
) -> None:
    """Print migrations as SQL, to run them with another tool. This needs no database.

    Do not run the SQL in one transaction: commit after each version.
    """
    chosen = _choose_migration_lines(line, is_single_line=bool(versions))
    for version in versions:
        _check_version_exists(chosen[0], version, "--version")
    direction = Direction.DOWN if is_down else Direction.UP
    texts = [
        Migrator.sql(
            line=one, versions=versions or None, direction=direction, schema=database.schema
        )
        for one in (reversed(chosen) if is_down else chosen)
    ]
    click.echo("\n".join(texts), nl=False)
