"""`riverpy bench`: measure how fast jobs are inserted and worked, and how soon a new job starts."""

from __future__ import annotations

import click

from riverpy._tools.bench.run import (
    PICKUP_INSERT_INTERVAL,
    PICKUP_JOB_COUNT,
    BenchLoad,
    BenchResult,
    BenchRun,
)
from riverpy.cli._embedded import get_embedded_server
from riverpy.cli._logging import configure_logging
from riverpy.cli._options import DatabaseSettings, database_options, json_option
from riverpy.cli._output import print_json, print_note, print_table
from riverpy.cli._run import run_async
from riverpy.cli._types import IntegerType, NumberType
from riverpy.config import MAX_WORKERS_MAX
from riverpy.migrate import migrate_all

EMBEDDED_SERVER_NAME = "bench"
"""The name of the embedded server for `--embedded`. It is only used for measurements."""

_EPILOG = f"""\b
Measurements, in this order:
  insert     `insert_many_fast` (COPY) in batches of 10,000, from the first call to the last result
  work       from the first claim until the last result is stored, with all features on
  CPU        time of this process while it works, and of the server if it is on this machine
  occupancy  with --sleep-ms: the share of the slots' time that jobs use, without start and end
  memory     of this process, after the work
  pickup     {PICKUP_JOB_COUNT} single inserts, one each {PICKUP_INSERT_INTERVAL * 1e3:g} ms, \
while the worker
             is idle: from the call that inserts to the first line of the job

The jobs stay in the table. Exit codes: 0 measured, 1 failed or refused, 2 wrong usage, 130 after
Ctrl-C.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "-n",
    "--jobs",
    type=IntegerType(min=1),
    default=50_000,
    show_default=True,
    help="Number of jobs to insert and work.",
)
@click.option(
    "--slots",
    type=IntegerType(1, MAX_WORKERS_MAX),
    default=100,
    show_default=True,
    help="Number of jobs that run at the same time.",
)
@click.option(
    "--sleep-ms",
    type=NumberType(0, 10_000),
    default=0.0,
    help="Milliseconds that a job sleeps, on average; each varies by up to half of it. Default: 0.",
)
@click.option(
    "--prefetch/--no-prefetch", default=False, help="Claim jobs before slots are free. Default: no."
)
@click.option("--force", is_flag=True, help="First delete all jobs in the table.")
@click.option("--embedded", is_flag=True, help="Use an embedded PostgreSQL only for this.")
@json_option
@database_options
def bench(
    *,
    jobs: int,
    slots: int,
    sleep_ms: float,
    prefetch: bool,
    force: bool,
    embedded: bool,
    as_json: bool,
    database: DatabaseSettings,
) -> None:
    """Measure how fast jobs are inserted and worked, and how soon a new job starts.

    The command inserts jobs that do nothing or sleep, and works them as `riverpy worker` does. The
    table of jobs must be empty. --force deletes its jobs first.
    """
    configure_logging("console", "warning")
    load = BenchLoad(
        job_count=jobs, max_workers=slots, mean_sleep=sleep_ms / 1e3, prefetch=prefetch
    )
    if embedded:
        if database.url_source == "--database-url":
            raise click.UsageError("--embedded and --database-url exclude each other")
        with get_embedded_server(EMBEDDED_SERVER_NAME) as url:
            run_async(migrate_all, url)
            measurement = run_async(_run_bench, url, None, load, True)
    elif database.url is None:
        raise click.UsageError(
            "no database is given: use --database-url, RIVERPY_DATABASE_URL or DATABASE_URL, or "
            "--embedded for a temporary one"
        )
    else:
        measurement = run_async(_run_bench, database.url, database.schema, load, force)
    if as_json:
        print_json(measurement)
    else:
        _print_measurement(measurement)


async def _run_bench(url: str, schema: str | None, load: BenchLoad, force: bool) -> BenchResult:
    measured = BenchRun(url, schema, load)
    if deleted := await measured.require_empty_job_table(delete_jobs=force):
        print_note(f"deleted {deleted:,} jobs from the table")
    return await measured.measure()


def _print_measurement(result: BenchResult) -> None:
    click.echo(
        f"riverpy {result.riverpy_version}, PostgreSQL {result.postgres_version}, "
        f"{result.jobs:,} jobs, {result.slots:,} slots\n"
    )
    server, occupied = result.server_cpu_us_per_job, result.occupancy
    print_table(
        ("", "VALUE", "UNIT"),
        [
            ("insert", f"{result.insert_per_s:,.0f}", "jobs/s"),
            ("work", f"{result.work_per_s:,.0f}", "jobs/s"),
            ("CPU of this process", f"{result.client_cpu_us_per_job:.1f}", "us/job"),
            ("CPU of the server", None if server is None else f"{server:.1f}", "us/job"),
            ("occupancy", None if occupied is None else f"{occupied * 100:.1f}", "%"),
            ("pickup p50", f"{result.pickup_p50_ms:.2f}", "ms"),
            ("pickup p99", f"{result.pickup_p99_ms:.2f}", "ms"),
            ("memory", None if result.rss_mib is None else f"{result.rss_mib:.0f}", "MiB"),
        ],
    )
