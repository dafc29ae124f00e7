"""What the insert of one job adds to a caller's transaction, in each kind of session."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from scripts._bench.competitors import Peer
from scripts._bench.process import program, run_json
from scripts._bench.tx_insert.names import BARE, MEASURE, SESSIONS, make_measure_key
from scripts._bench.tx_insert.texts import TEXTS

if TYPE_CHECKING:
    from scripts._bench.run import Run
    from scripts._bench.server import Database

TRANSACTIONS_SHARE = 0.02
"""The share of a run's jobs that is the number of transactions with each insert in a round, at most
1,000."""
TIMEOUT = 300.0
"""Seconds for one kind of session in one round."""


async def measure_transactions(run: Run) -> None:
    """Measure all kinds of sessions, in rounds. Within a round the inserts take turns."""
    chosen = [one for one in SESSIONS if run.options.wants(MEASURE, make_measure_key(one))]
    if not chosen:
        return
    run.notes.append(_describe_versions())
    database = await _prepare(run)
    for number in range(run.options.rounds):
        for session in chosen:
            what = f"round {number + 1}, {MEASURE}, {session}"
            async with run.trying("riverpy", what):
                await database.fetch("checkpoint")
                await _measure(run, database, session, number)


async def _prepare(run: Run) -> Database:
    """Create one database with the tables of all queues. Its commits do not wait for the disk: this
    wait is the same with a job and without, and hides what the insert adds."""
    database = await run.server.river(MEASURE)
    name = await database.value("database")
    async with database.connected() as connection:
        await connection.execute(TEXTS["create_table"])
        await connection.execute(f'alter database "{name}" set synchronous_commit = off')
    for one in run.competitors:
        if isinstance(one, Peer):
            async with run.trying(one.name, f"{MEASURE}, tables"):
                await run_json(one.command("install", database.url), TIMEOUT)
    return database


def _describe_versions() -> str:
    found: list[str] = []
    for name in ("SQLAlchemy", "asyncpg", "psycopg", "psycopg2-binary", "Django", "riverqueue"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"{MEASURE}: {', '.join(found)}; commits do not wait for the disk"


async def _measure(run: Run, database: Database, session: str, number: int) -> None:
    jobs = run.options.jobs
    transactions = min(1000, max(20, int(jobs * TRANSACTIONS_SHARE)))
    names = [*BARE, *run.options.names]
    command = program("tx_insert.program", session, database.url, transactions, ",".join(names))
    found = (await run_json(command, TIMEOUT)).found
    for name, value in found["us"].items():
        run.samples.add(make_measure_key(session), name, number, value)
    for name, reason in found["reasons"].items():
        run.samples.reasons.setdefault(f"{MEASURE}, {session}: {name}", reason)
