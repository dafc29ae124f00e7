"""`riverpy bench`: how fast this machine, this database and riverpy are together."""

from __future__ import annotations

import click

from riverpy._tools.bench.run import PICKUP_INTERVAL, PICKUPS, Bench, Load, Measurement
from riverpy.cli._embedded import embedded_server
from riverpy.cli._logging import configure_logging
from riverpy.cli._options import DatabaseSettings, database_options, json_option
from riverpy.cli._output import print_json, print_note, print_table
from riverpy.cli._run import run
from riverpy.cli._types import IntegerType, NumberType
from riverpy.config import MAX_WORKERS_MAX
from riverpy.migrate import migrate_all

SERVER = "bench"
"""The name of the embedded server, which holds nothing but measurements."""

_EPILOG = f"""\b
Measured, in this order:
  insert  `insert_many_fast` (COPY) in batches of 10,000, from the first call to the last answer
  work    from the first claim until the last completion is stored, all features on
  CPU     of this process, and of the server's where it is on this machine, while it works
  occupancy  with --sleep-ms: the share of the slots' time that is spent in jobs, but for the ramp
          up and the tail
  memory  of this process, after it has worked
  pickup  {PICKUPS} single inserts, one each {PICKUP_INTERVAL * 1e3:.0f} ms, into the idle worker:
          from before the call that inserts to the first line of the job

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
    help="How many jobs to insert and work.",
)
@click.option(
    "--slots",
    type=IntegerType(1, MAX_WORKERS_MAX),
    default=100,
    show_default=True,
    help="How many may run at once.",
)
@click.option(
    "--sleep-ms",
    type=NumberType(0, 10_000),
    default=0.0,
    help="How long each job sleeps, and up to half of it more or less. Default: not at all.",
)
@click.option(
    "--prefetch/--no-prefetch", default=False, help="Whether to claim ahead of free slots."
)
@click.option("--force", is_flag=True, help="Delete all jobs that are in the table before.")
@click.option(
    "--embedded", is_flag=True, help="Measure on an embedded PostgreSQL, made for it alone."
)
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
    """Measure insert rate, work rate and pickup latency on a database.

    Inserts jobs that do nothing, or sleep, into a queue of their own and works them as `riverpy
    worker` does. The table of jobs must be empty, or is emptied with --force.
    """
    configure_logging("console", "warning")
    load = Load(jobs=jobs, slots=slots, sleep=sleep_ms / 1e3, prefetch=prefetch)
    if embedded:
        if database.url_value.source == "--database-url":
            raise click.UsageError("--embedded and --database-url are two databases: choose one")
        with embedded_server(SERVER) as url:
            run(_migrate, url)
            measurement = run(_measure, url, None, load, True)
    elif database.url is None:
        raise click.UsageError(
            "no database is given: use --database-url, RIVERPY_DATABASE_URL or DATABASE_URL, or "
            "--embedded for one that is made for measurements"
        )
    else:
        measurement = run(_measure, database.url, database.schema, load, force)
    if as_json:
        print_json(measurement)
    else:
        _print(measurement)


async def _migrate(url: str) -> None:
    await migrate_all(url)


async def _measure(url: str, schema: str | None, load: Load, force: bool) -> Measurement:
    measured = Bench(url, schema, load)
    if deleted := await measured.empty(force=force):
        print_note(f"deleted {deleted:,} jobs that were in the table")
    return await measured.measure()


def _print(found: Measurement) -> None:
    click.echo(
        f"riverpy {found.riverpy_version}, PostgreSQL {found.postgres_version}, "
        f"{found.jobs:,} jobs, {found.slots:,} slots\n"
    )
    server, occupied = found.server_cpu_us_per_job, found.occupancy
    print_table(
        ("", "VALUE", "UNIT"),
        [
            ("insert", f"{found.insert_per_s:,.0f}", "jobs/s"),
            ("work", f"{found.work_per_s:,.0f}", "jobs/s"),
            ("CPU of this process", f"{found.client_cpu_us_per_job:.1f}", "us/job"),
            ("CPU of the server", None if server is None else f"{server:.1f}", "us/job"),
            ("occupancy", None if occupied is None else f"{occupied * 100:.1f}", "%"),
            ("pickup p50", f"{found.pickup_p50_ms:.2f}", "ms"),
            ("pickup p99", f"{found.pickup_p99_ms:.2f}", "ms"),
            ("memory", None if found.rss_mib is None else f"{found.rss_mib:.0f}", "MiB"),
        ],
    )
