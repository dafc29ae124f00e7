"""Storage: what makes tables and indexes of jobs slow: bloat, dead rows, and who keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import (
    Finding,
    Level,
    count,
    masked_query,
    names,
    shown,
    size,
    span,
)
from riverpy._tools.doctor.statements import (
    doctor_indexes,
    doctor_locks,
    doctor_snapshots,
    doctor_table,
)

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import IndexRow, LockRow, SnapshotRow, TableRow

SNAPSHOT_AGE = 60.0
"""Seconds for which a snapshot may be held."""
SNAPSHOT_TRANSACTIONS = 1_000_000
"""The same in transactions, where seconds are not known."""
LOCK_AGE = 30.0
"""Seconds for which a transaction may hold locks on River's tables."""
LOCK_WAIT_AGE = 3.0
"""The same while others wait for it."""
BLOAT_SIZE = 64 * 1024 * 1024
BLOAT_FACTOR = 4.0
"""An index is bloated that is this large, and that many times its estimate."""
NEEDED = {
    "river_job_pkey",
    "river_job_prioritized_fetching_index",
    "river_job_state_and_finalized_at_index",
    "river_job_unique_idx",
}
"""The indexes of the table of jobs that riverpy's statements walk."""
DEAD_ROWS = 100_000
"""Dead rows that do not matter."""
VACUUM_WAIT = 600.0
"""Seconds that autovacuum, which looks each minute, has to get at dead rows."""


async def check_indexes(patient: DatabaseSnapshot) -> list[Finding]:
    """Indexes that no query uses, that a rebuild left, or that are larger than they should be.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with patient.session.reading() as connection:
        rows = await doctor_indexes(connection, patient.schema)
    total = sum(row.size for row in rows)
    text = f"{count(len(rows), 'index', plural='indexes')}, {size(total)}"
    data: dict[str, object] = {row.name: row.size for row in rows}
    findings = [_index(patient, row) for row in rows]
    missing = sorted(NEEDED - {row.name for row in rows})
    if missing:
        findings.append(
            Finding(
                Level.FAIL,
                "indexes",
                f"{names(missing)} should be there: without them every claim reads the whole table",
                "make them as `riverpy migrate sql` shows, with CREATE INDEX CONCURRENTLY",
                {"missing": missing},
            )
        )
    return [
        Finding(Level.OK, "indexes", text, data={"indexes": data}),
        *(finding for finding in findings if finding is not None),
    ]


def _index(patient: DatabaseSnapshot, row: IndexRow) -> Finding | None:
    place = f'"{patient.schema}"."{row.name}"'
    data: dict[str, object] = {"index": row.name, "size": row.size, "estimate": row.estimate}
    if row.is_held:
        return None  # somebody is at it
    if row.is_artifact and not row.is_valid:
        return Finding(
            Level.WARN,
            "indexes",
            f"{row.name} is what an interrupted rebuild left: it costs writes and disk "
            f"({size(row.size)}), and no query uses it",
            "a leader that owns the indexes drops it at its next run, at midnight UTC; or now: "
            f"DROP INDEX CONCURRENTLY {place}",
            data,
        )
    if not row.is_valid:
        return Finding(
            Level.FAIL,
            "indexes",
            f"{row.name} is invalid, since its concurrent build failed: no query uses it",
            f"REINDEX INDEX CONCURRENTLY {place}",
            data,
        )
    if row.estimate and row.size >= BLOAT_SIZE and row.size >= row.estimate * BLOAT_FACTOR:
        return Finding(
            Level.WARN,
            "indexes",
            f"{row.name} is bloated: {size(row.size)}, and new it would have about "
            f"{size(row.estimate)} (an estimate by the planner's statistics)",
            f"REINDEX INDEX CONCURRENTLY {place}, or let the leader own the indexes: it rebuilds "
            "them each night. Look for what keeps dead rows: `snapshots`, `vacuum`",
            data,
        )
    return None


async def check_vacuum(patient: DatabaseSnapshot) -> list[Finding]:
    """Whether dead rows of the table of jobs are removed.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with patient.session.reading() as connection:
        row = await doctor_table(connection, patient.schema, made_at=patient.made_at)
    if row is None:
        return []
    table = f'"{patient.schema}".river_job'
    ago = "never" if row.vacuumed is None else f"{span(row.vacuumed)} ago"
    text = f"river_job has {row.live:,} rows and {row.dead:,} dead ones, vacuumed {ago}"
    data: dict[str, object] = {"live": row.live, "dead": row.dead, "vacuumed": row.vacuumed}
    if row.is_under_way:
        text += "; a vacuum is under way"
    problem = _vacuum_problem(row, table)
    if problem is None:
        if row.dead > row.live and await _held_snapshots(patient):
            text += ": they stay as long as somebody holds an older snapshot (`snapshots`)"
        return [Finding(Level.OK, "vacuum", text, data=data)]
    why, fix = problem
    return [Finding(Level.WARN, "vacuum", f"{text}: {why}", fix, data)]


def _vacuum_problem(row: TableRow, table: str) -> tuple[str, str] | None:
    if row.is_off_here:
        return (
            "autovacuum is off for the table",
            f"let it be on: ALTER TABLE {table} RESET (autovacuum_enabled), then VACUUM {table}",
        )
    if not row.is_on:
        return (
            "autovacuum is off on this server",
            "ALTER SYSTEM SET autovacuum = on and track_counts = on, then SELECT pg_reload_conf()",
        )
    is_late = row.waited >= VACUUM_WAIT and not row.is_under_way
    if row.dead >= DEAD_ROWS and row.dead > row.live and is_late:
        return (
            "more dead than live ones make claims slow",
            (
                f"VACUUM {table}. If they stay, something keeps them: see `snapshots`; if they "
                f"come back: ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02, "
                "autovacuum_vacuum_cost_delay = 0)"
            ),
        )
    return None


async def check_snapshots(patient: DatabaseSnapshot) -> list[Finding]:
    """Who keeps dead rows from being removed.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with patient.session.reading() as connection:
        rows = await doctor_snapshots(connection)
    old = [row for row in rows if _is_old(row)]
    if not old:
        longest = max((row.seconds or 0 for row in rows), default=0)
        text = f"{count(len(rows), 'open one')}, the oldest for {span(longest)}"
        text = text if rows else "nobody holds one"
        return [Finding(Level.OK, "snapshots", text, data={"oldest": round(longest, 3)})]
    return shown([_snapshot(row) for row in old])


async def _held_snapshots(patient: DatabaseSnapshot) -> list[SnapshotRow]:
    """Those that are held for long."""
    async with patient.session.reading() as connection:
        return [row for row in await doctor_snapshots(connection) if _is_old(row)]


def _is_old(row: SnapshotRow) -> bool:
    if row.holder == "replication slot" and row.state == "inactive":
        return True
    if row.seconds is not None:
        return row.seconds >= SNAPSHOT_AGE
    return (row.transactions or 0) >= SNAPSHOT_TRANSACTIONS


def _snapshot(row: SnapshotRow) -> Finding:
    since = "" if row.seconds is None else f" for {span(row.seconds)}"
    data: dict[str, object] = {
        "holder": row.holder,
        "id": row.id,
        "role": row.role,
        "application": row.application,
        "state": row.state,
        "seconds": row.seconds,
        "transactions": row.transactions,
        "query": masked_query(row.text),
    }
    since_then = count(row.transactions or 0, "transaction began", plural="transactions began")
    effect = (
        f"rows that died since then stay ({since_then}), and slow claims down as they become many"
    )
    if row.holder == "prepared transaction":
        text = f'prepared transaction "{row.id}" of {row.role} is open{since}: {effect}'
        fix = "end it: COMMIT PREPARED or ROLLBACK PREPARED with its name"
    elif row.holder == "replication slot":
        text = f'replication slot "{row.id}" ({row.state}) holds a snapshot: {effect}'
        fix = (
            "bring its standby back, or drop the slot: pg_drop_replication_slot. With "
            "hot_standby_feedback, long queries on the standby count too"
        )
    else:
        text = f"{_who(row)} holds a snapshot{since}: {effect}"
        fix = (
            f"end it: SELECT pg_terminate_backend({row.id}), or set "
            "idle_in_transaction_session_timeout for its role; let reports and dumps read a standby"
        )
    return Finding(Level.WARN, "snapshots", text, fix, data)


def _who(row: SnapshotRow | LockRow) -> str:
    application = f", {row.application!r}" if row.application else ""
    text = f": {masked_query(row.text)}" if row.text else ""
    role, state = row.role or "unknown role", row.state or "unknown state"
    return f"session {row.id} ({role}{application}, {state}{text})"


async def check_locks(patient: DatabaseSnapshot) -> list[Finding]:
    """Whose open transactions hold locks on River's tables.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with patient.session.reading() as connection:
        rows = await doctor_locks(connection, patient.schema)
    old = [row for row in rows if row.seconds >= (LOCK_WAIT_AGE if row.waiting else LOCK_AGE)]
    if not old:
        text = "nobody holds any on River's tables for long"
        return [Finding(Level.OK, "locks", text)]
    findings = [
        Finding(
            Level.WARN,
            "locks",
            f"{_who(row)} holds locks on {'all' if row.is_whole else 'rows'} of "
            f"{names(row.tables)} for {span(row.seconds)}; "
            f"{count(row.waiting, 'session')} wait{'s' if row.waiting == 1 else ''} for it",
            f"let the program commit sooner, or end it: SELECT pg_terminate_backend({row.id})",
            {
                "pid": row.id,
                "role": row.role,
                "application": row.application,
                "state": row.state,
                "seconds": round(row.seconds, 3),
                "tables": row.tables,
                "waiting": row.waiting,
                "query": masked_query(row.text),
            },
        )
        for row in old
    ]
    return shown(findings)
