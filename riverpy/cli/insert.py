"""`riverpy insert`: insert one job with raw JSON args."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from riverpy import _json
from riverpy.cli._job_output import JobOutput, print_job
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import print_json
from riverpy.cli._run import run
from riverpy.cli._types import DURATION, NAME, TEXT, TIMESTAMP, IntegerType
from riverpy.client import Client
from riverpy.config import Config
from riverpy.insert_opts import MAX_ATTEMPTS_MAX, PRIORITY_MAX, InsertOpts, UniqueOpts
from riverpy.job import JobState, RawArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.cli._options import DatabaseSettings
    from riverpy.insert_opts import InsertResult

CommandT = TypeVar("CommandT", bound="Callable[..., object]")


def _unique_options(command: CommandT) -> CommandT:
    """Add the options that define when the job is a duplicate."""
    for option in (
        click.option(
            "--unique-exclude-kind", is_flag=True, help="Also compare with jobs of other kinds."
        ),
        click.option(
            "--unique-states",
            type=TEXT,
            metavar="A,B",
            help="Compare with jobs in these states. Default: all but cancelled and discarded.",
        ),
        click.option(
            "--unique-by-period",
            type=DURATION,
            help="Compare with jobs of the same period, such as 1h.",
        ),
        click.option(
            "--unique-by-queue", is_flag=True, help="Compare with jobs in the same queue."
        ),
        click.option(
            "--unique-by-args", is_flag=True, help="Compare with jobs with the same args."
        ),
    ):
        command = option(command)
    return command


@click.command
@click.argument("kind", type=NAME)
@click.argument("args", type=TEXT, default="{}", metavar="[ARGS-JSON|-]")
@click.option("--queue", type=NAME, metavar="NAME", help="Queue of the job. Default: default.")
@click.option(
    "--at", type=TIMESTAMP, help="Time from which the job may run, such as 2026-01-31T18:00:00Z."
)
@click.option("--in", "delay", type=DURATION, help="Delay until the job may run, such as 1h30m.")
@click.option(
    "--priority",
    type=IntegerType(1, PRIORITY_MAX),
    help="Priority from 1 (first) to 4 (last). Default: 1.",
)
@click.option("--tags", type=TEXT, metavar="A,B", help="Tags of the job. Default: none.")
@click.option(
    "--metadata",
    type=TEXT,
    metavar="JSON",
    help="Metadata of the job, as a JSON object. Default: {}.",
)
@click.option(
    "--max-attempts",
    type=IntegerType(1, MAX_ATTEMPTS_MAX),
    help="Maximum number of attempts. Default: 25.",
)
@click.option(
    "--pending", is_flag=True, help="Insert the job in state pending, in which no client works it."
)
@_unique_options
@json_option
@database_options
def insert(database: DatabaseSettings, *, kind: str, args: str, as_json: bool, **opts: Any) -> None:
    """Insert one job of KIND. Its args are a JSON object, or - to read them from stdin.

    The command prints the job, or the existing job if it is a duplicate.
    """
    raw = RawArgs(kind, _json.normalize_args(_read_stdin() if args == "-" else args, path="args"))
    result = run(_insert, database.required_url(), database.schema, raw, _insert_opts(**opts))
    job = JobOutput.of(result.job, result.unique_skipped_as_duplicate)
    (print_json if as_json else print_job)(job)


def _read_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the args on stdin are not UTF-8: {error}") from None
    if not text.strip():
        raise click.UsageError("stdin is empty or closed, but - reads the args from it")
    return text


async def _insert(url: str, schema: str | None, args: RawArgs, opts: InsertOpts) -> InsertResult:
    async with Client(url, config=Config(schema=schema, pool_size=1)) as client:
        return await client.insert(args, opts)


def _insert_opts(
    *,
    queue: str | None,
    at: datetime | None,
    delay: timedelta | None,
    priority: int | None,
    tags: str | None,
    metadata: str | None,
    max_attempts: int | None,
    pending: bool,
    unique_by_args: bool,
    unique_by_queue: bool,
    unique_by_period: timedelta | None,
    unique_states: str | None,
    unique_exclude_kind: bool,
) -> InsertOpts:
    unique = UniqueOpts(
        by_args=unique_by_args,
        by_queue=unique_by_queue,
        by_period=unique_by_period,
        by_state=None if unique_states is None else _states(unique_states),
        exclude_kind=unique_exclude_kind,
    )
    return InsertOpts(
        queue=queue,
        scheduled_at=_scheduled_at(at, delay),
        priority=priority,
        tags=None if tags is None else _split(tags),
        metadata=None if metadata is None else _metadata(metadata),
        max_attempts=max_attempts,
        pending=pending,
        unique_opts=unique,
    )


def _scheduled_at(at: datetime | None, delay: timedelta | None) -> datetime | None:
    if delay is None:
        return at
    if at is not None:
        raise click.UsageError("--at and --in exclude each other")
    try:
        return datetime.now(UTC) + delay
    except OverflowError:
        raise click.UsageError("--in gives a time after the year 9999") from None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _metadata(text: str) -> dict[str, Any]:
    return json.loads(_json.normalize_object(text, path="metadata"))


def _states(text: str) -> list[JobState]:
    try:
        return [JobState(name) for name in _split(text)]
    except ValueError as error:
        raise click.BadParameter(
            f"{error}; the states are {', '.join(JobState)}", param_hint="--unique-states"
        ) from None
