"""`riverpy insert`: insert one job with raw JSON args."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from riverpy import _json
from riverpy.cli._job_output import job_to_json_object, print_job
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import print_json
from riverpy.cli._run import run_async
from riverpy.cli._types import (
    DURATION_TYPE,
    NONEMPTY_TEXT_TYPE,
    TEXT_TYPE,
    TIMESTAMP_TYPE,
    IntegerType,
    ParsedType,
)
from riverpy.client import Client
from riverpy.config import Config
from riverpy.insert_opts import MAX_ATTEMPTS_MAX, PRIORITY_MAX, InsertOpts, ReplaceOpts, UniqueOpts
from riverpy.job import JobState, RawArgs

if TYPE_CHECKING:
    from riverpy.cli._options import DatabaseSettings
    from riverpy.insert_opts import InsertResult


_REPLACEABLE_FIELDS = ("args", "scheduled_at", "priority", "metadata")


def _split_at_commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _parse_replaced_fields(text: str) -> list[str]:
    names = _split_at_commas(text)
    for name in names:
        if name not in _REPLACEABLE_FIELDS:
            raise ValueError(f"{name!r} is not one of {', '.join(_REPLACEABLE_FIELDS)}")
    return names


def _parse_states(text: str) -> list[JobState]:
    try:
        return [JobState(name) for name in _split_at_commas(text)]
    except ValueError as error:
        raise ValueError(f"{error}; the states are {', '.join(JobState)}") from None


@click.command
@click.argument("kind", type=NONEMPTY_TEXT_TYPE)
@click.argument("args", type=TEXT_TYPE, default="{}", metavar="[ARGS-JSON|-]")
@click.option(
    "--queue", type=NONEMPTY_TEXT_TYPE, metavar="NAME", help="Queue of the job. Default: default."
)
@click.option(
    "--at",
    type=TIMESTAMP_TYPE,
    help="Time from which the job may run, such as 2026-01-31T18:00:00Z.",
)
@click.option(
    "--in", "delay", type=DURATION_TYPE, help="Delay until the job may run, such as 1h30m."
)
@click.option(
    "--priority",
    type=IntegerType(1, PRIORITY_MAX),
    help="Priority from 1 (first) to 4 (last). Default: 1.",
)
@click.option(
    "--tags",
    type=ParsedType("tags", _split_at_commas),
    metavar="A,B",
    help="Tags of the job. Default: none.",
)
@click.option(
    "--metadata",
    type=TEXT_TYPE,
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
@click.option("--notify-end", is_flag=True, help="Notify clients that wait when the job ends.")
@click.option(
    "--unique-by-args", "by_args", is_flag=True, help="Make the job unique: compare the args."
)
@click.option(
    "--unique-by-queue", "by_queue", is_flag=True, help="Make the job unique: compare the queue."
)
@click.option(
    "--unique-by-period",
    "by_period",
    type=DURATION_TYPE,
    help="Make the job unique: compare the period, such as 1h.",
)
@click.option(
    "--unique-states",
    "by_state",
    type=ParsedType("states", _parse_states),
    metavar="A,B",
    help="A unique job is compared with jobs in these states. Default: all but cancelled and "
    "discarded.",
)
@click.option(
    "--unique-exclude-kind",
    "exclude_kind",
    is_flag=True,
    help="A unique job is also compared with jobs of other kinds.",
)
@click.option(
    "--replace",
    type=ParsedType("names of values", _parse_replaced_fields),
    metavar="A,B",
    help="If a waiting job is a duplicate, replace these of its values: args, scheduled_at, "
    "priority, metadata. Needs an option --unique-….",
)
@click.option(
    "--replace-max-wait",
    "max_wait",
    type=DURATION_TYPE,
    help="With --replace: the longest time from the creation of the job to its new time, such as "
    "1m.",
)
@click.option(
    "--expires-in",
    type=DURATION_TYPE,
    help="Cancel the job if it has not started after this time, such as 10m.",
)
@json_option
@database_options
def insert(database: DatabaseSettings, *, kind: str, args: str, as_json: bool, **opts: Any) -> None:
    """Insert one job of KIND. Its args are a JSON object. If you write `-` instead, the command
    reads them from stdin.

    The command prints the job, or the existing job if it is a duplicate. With --replace, an
    existing job that still waits gets new values.
    """
    text = _read_args_from_stdin() if args == "-" else args
    raw = RawArgs(kind, _json.compact_object_like_go(text, path="args", may_be_array=True))
    result = run_async(
        _insert_job, database.require_url(), database.schema, raw, _make_insert_opts(**opts)
    )
    job = {
        **job_to_json_object(result.job),
        "duplicate": result.unique_skipped_as_duplicate,
        "replaced": result.is_replaced,
    }
    (print_json if as_json else print_job)(job)


def _read_args_from_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the args on stdin are not UTF-8: {error}") from None
    if not text.strip():
        raise click.UsageError("stdin is empty or closed, but - reads the args from it")
    return text


async def _insert_job(
    url: str, schema: str | None, args: RawArgs, opts: InsertOpts
) -> InsertResult:
    async with Client(url, config=Config(schema=schema, pool_size=1)) as client:
        return await client.insert(args, opts)


def _make_insert_opts(
    *,
    at: datetime | None,
    delay: timedelta | None,
    metadata: str | None,
    replace: list[str] | None,
    max_wait: timedelta | None,
    **opts: Any,
) -> InsertOpts:
    unique = UniqueOpts(**{name: opts.pop(name) for name in UniqueOpts.__struct_fields__})
    return InsertOpts(
        scheduled_at=_compute_scheduled_at(at, delay),
        metadata=None if metadata is None else _parse_metadata(metadata),
        unique_opts=unique,
        replace=_make_replace_opts(replace, max_wait),
        **opts,
    )


def _make_replace_opts(replace: list[str] | None, max_wait: timedelta | None) -> ReplaceOpts | None:
    if replace is None:
        if max_wait is not None:
            raise click.UsageError("--replace-max-wait needs --replace")
        return None
    return ReplaceOpts(**{name: name in replace for name in _REPLACEABLE_FIELDS}, max_wait=max_wait)


def _compute_scheduled_at(at: datetime | None, delay: timedelta | None) -> datetime | None:
    if delay is None:
        return at
    if at is not None:
        raise click.UsageError("--at and --in exclude each other")
    try:
        return datetime.now(UTC) + delay
    except OverflowError:
        raise click.UsageError("--in gives a time after the year 9999") from None


def _parse_metadata(text: str) -> dict[str, Any]:
    return json.loads(_json.compact_object_like_go(text, path="metadata"))
