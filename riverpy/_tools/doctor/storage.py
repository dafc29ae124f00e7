"""Checks of `riverpy doctor` for causes of slow tables: foreign keys, old snapshots, locks, dead
rows and bloated indexes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._log_events import ROW_SET_ASIDE
from riverpy._postgres.schema import MAIN_MIGRATION_LINE
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.statements import (
    read_foreign_keys,
    read_indexes,
    read_job_table_stats,
    read_lock_holders,
    read_open_snapshots,
)
from riverpy._tools.text import (
    format_count,
    format_names,
    format_seconds,
    format_size,
    format_waiting_count,
    mask_and_shorten_query,
)

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import (
        IndexRow,
        JobTableStatsRow,
        LockHolderRow,
        OpenSnapshotRow,
    )

SNAPSHOT_AGE_WARN_SECONDS = 60.0
"""`riverpy doctor` reports an open PostgreSQL snapshot that is at least this many seconds old."""
SNAPSHOT_WARN_TRANSACTIONS = 1_000_000
"""If the age of an open PostgreSQL snapshot is not known, `riverpy doctor` reports the snapshot
when at least this many transactions have started after it."""
LOCK_AGE_WARN_SECONDS = 30.0
"""`riverpy doctor` reports a transaction that holds locks on River's tables and started at least
this many seconds ago."""
BLOCKING_LOCK_AGE_WARN_SECONDS = 3.0
"""`riverpy doctor` reports a transaction whose locks make other sessions wait, and that started at
least this many seconds ago."""
BLOATED_INDEX_BYTES_MIN = 64 * 1024 * 1024
"""`riverpy doctor` reports an index as bloated only if the index has at least this many bytes."""
BLOATED_INDEX_SIZE_FACTOR = 4.0
"""`riverpy doctor` reports an index as bloated only if its size is at least this many times the
estimated size of a new index."""
NEEDED_INDEXES = {
    "river_job_pkey",
    "river_job_prioritized_fetching_index",
    "river_job_state_and_finalized_at_index",
    "river_job_unique_idx",
}
"""The indexes of `river_job` that riverpy's statements use."""
DEAD_ROWS_WARN_COUNT = 100_000
"""`riverpy doctor` reports a late vacuum of `river_job` only if this table has at least this many
dead rows, and more dead rows than live rows."""
LATE_VACUUM_SECONDS = 600.0
"""Seconds after which the vacuum of `river_job` is late. They count from the latest of these
events: the last vacuum of the table, the creation of the table, the start of the server. By
default, autovacuum checks the tables every minute."""


async def check_foreign_keys(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report foreign keys that prevent the leader from deleting rows of River's tables."""
    findings = [
        warn_finding(
            f"table {row.referring_table} refers to {row.referenced_table} by "
            f'"{row.constraint_name}". The leader cannot delete the rows that it refers to, and '
            "tries again and again",
            "add ON DELETE CASCADE or SET NULL to the foreign key, or drop it. The leader's log "
            f"names the rows (`{ROW_SET_ASIDE}`)",
            table=row.referenced_table,
            referring=row.referring_table,
            constraint=row.constraint_name,
        )
        for row in await snapshot.session.read(read_foreign_keys, snapshot.schema)
    ]
    return findings or [ok_finding("no foreign key prevents a deletion", references=0)]


async def check_indexes(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report indexes that are missing, invalid, left over from an interrupted rebuild, or
    bloated."""
    rows = await snapshot.session.read(read_indexes, snapshot.schema)
    total = sum(row.size for row in rows)
    text = f"{format_count(len(rows), 'index', plural='indexes')}, {format_size(total)}"
    findings = [ok_finding(text, indexes={row.name: row.size for row in rows})]
    findings += [finding for row in rows if (finding := _index_finding(snapshot, row)) is not None]
    if missing := sorted(NEEDED_INDEXES - {row.name for row in rows}):
        text = f"{format_names(missing)} is missing. Without it every claim reads the whole table"
        fix = "create it as `riverpy migrate sql` shows, with CREATE INDEX CONCURRENTLY"
        findings.append(fail_finding(text, fix, missing=missing))
    return findings


def _index_finding(snapshot: DatabaseSnapshot, row: IndexRow) -> Finding | None:
    name = f'"{snapshot.schema}"."{row.name}"'
    data: dict[str, object] = {"index": row.name, "size": row.size, "estimate": row.rebuilt_size}
    if row.is_being_built:
        return None
    if row.is_rebuild_remnant and not row.is_valid:
        return warn_finding(
            f"an interrupted rebuild left {row.name}. No query uses it, but it slows writes and "
            f"uses {format_size(row.size)} of disk",
            "a leader that owns the indexes drops it at its next run, at midnight UTC. To drop it "
            f"now: DROP INDEX CONCURRENTLY {name}",
            **data,
        )
    if not row.is_valid:
        return fail_finding(
            f"{row.name} is invalid, because its concurrent build failed. No query uses it",
            f"REINDEX INDEX CONCURRENTLY {name}",
            **data,
        )
    size, rebuilt_size = row.size, row.rebuilt_size
    if (
        rebuilt_size
        and size >= BLOATED_INDEX_BYTES_MIN
        and size >= rebuilt_size * BLOATED_INDEX_SIZE_FACTOR
    ):
        return warn_finding(
            f"{row.name} is bloated: it has {format_size(row.size)}, and a new one would have "
            f"about {format_size(rebuilt_size)} (estimated from the planner's statistics)",
            f"REINDEX INDEX CONCURRENTLY {name}, or let the leader own the indexes, so that it "
            "rebuilds them each night. Find out what prevents the removal of dead rows: "
            "`snapshots`, `vacuum`",
            **data,
        )
    return None


async def check_vacuum(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report whether vacuum removes the dead rows of the table of jobs."""
    made_at = min(snapshot.schema_state.applied_at_by_line[MAIN_MIGRATION_LINE].values())
    row = await snapshot.session.read(read_job_table_stats, snapshot.schema, made_at=made_at)
    if row is None:
        return []
    ago = (
        "never"
        if row.seconds_since_vacuum is None
        else f"{format_seconds(row.seconds_since_vacuum)} ago"
    )
    text = f"river_job has {row.live_rows:,} rows and {row.dead_rows:,} dead rows, vacuumed {ago}"
    data: dict[str, object] = {
        "live": row.live_rows,
        "dead": row.dead_rows,
        "vacuumed": row.seconds_since_vacuum,
    }
    if row.is_vacuum_running:
        text += "; a vacuum runs now"
    problem = _find_vacuum_problem(row, f'"{snapshot.schema}".river_job')
    if problem is not None:
        why, fix = problem
        return [warn_finding(f"{text}: {why}", fix, **data)]
    if row.dead_rows > row.live_rows and any(
        map(_is_old_snapshot, await snapshot.session.read(read_open_snapshots))
    ):
        text += ". An older snapshot prevents their removal (`snapshots`)"
    return [ok_finding(text, **data)]


def _find_vacuum_problem(row: JobTableStatsRow, table: str) -> tuple[str, str] | None:
    """Return the problem with vacuum and the remedy, or None if there is no problem."""
    if row.is_autovacuum_off_for_table:
        return (
            "autovacuum is off for the table",
            f"turn it on: ALTER TABLE {table} RESET (autovacuum_enabled), then VACUUM {table}",
        )
    if not row.is_autovacuum_on_for_server:
        return (
            "autovacuum is off on this server",
            "ALTER SYSTEM SET autovacuum = on and track_counts = on, then SELECT pg_reload_conf()",
        )
    is_late = row.seconds_without_vacuum >= LATE_VACUUM_SECONDS and not row.is_vacuum_running
    if row.dead_rows >= DEAD_ROWS_WARN_COUNT and row.dead_rows > row.live_rows and is_late:
        fix = (
            f"VACUUM {table}. If the dead rows stay, see `snapshots`. If they come back: ALTER "
            f"TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02, "
            "autovacuum_vacuum_cost_delay = 0)"
        )
        return "more dead rows than live rows make claims slow", fix
    return None


async def check_open_snapshots(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report sessions, prepared transactions and replication slots that prevent the removal of dead
    rows."""
    rows = await snapshot.session.read(read_open_snapshots)
    old = [row for row in rows if _is_old_snapshot(row)]
    if not old:
        longest = max((row.age_seconds or 0 for row in rows), default=0)
        text = (
            f"{format_count(len(rows), 'open snapshot')}, the oldest for {format_seconds(longest)}"
        )
        text = text if rows else "no open snapshot"
        return [ok_finding(text, oldest=round(longest, 3))]
    return [_old_snapshot_finding(row) for row in old]


def _is_old_snapshot(row: OpenSnapshotRow) -> bool:
    if row.holder_type == "replication slot" and row.holder_state == "inactive":
        return True
    if row.age_seconds is not None:
        return row.age_seconds >= SNAPSHOT_AGE_WARN_SECONDS
    return (row.newer_transactions or 0) >= SNAPSHOT_WARN_TRANSACTIONS


def _old_snapshot_finding(row: OpenSnapshotRow) -> Finding:
    since = "" if row.age_seconds is None else f" for {format_seconds(row.age_seconds)}"
    started = format_count(
        row.newer_transactions or 0, "transaction has started", plural="transactions have started"
    )
    effect = (
        f"rows that died after its start ({started} since) are not removed, and many of them make "
        "claims slow"
    )
    if row.holder_type == "prepared transaction":
        text = f'prepared transaction "{row.holder_id}" of {row.role} is open{since}: {effect}'
        fix = "end it: COMMIT PREPARED or ROLLBACK PREPARED with its name"
    elif row.holder_type == "replication slot":
        text = f'replication slot "{row.holder_id}" ({row.holder_state}) holds a snapshot: {effect}'
        fix = (
            "start its standby again, or drop the slot: pg_drop_replication_slot. With "
            "hot_standby_feedback, long queries on the standby have the same effect"
        )
    else:
        text = f"{_describe_session(row)} holds a snapshot{since}: {effect}"
        fix = (
            f"end it: SELECT pg_terminate_backend({row.holder_id}), or set "
            "idle_in_transaction_session_timeout for its role. Run reports and dumps on a standby"
        )
    return warn_finding(
        text,
        fix,
        holder=row.holder_type,
        id=row.holder_id,
        role=row.role,
        application=row.application,
        state=row.holder_state,
        seconds=row.age_seconds,
        transactions=row.newer_transactions,
        query=mask_and_shorten_query(row.statement),
    )


def _describe_session(row: OpenSnapshotRow | LockHolderRow) -> str:
    application = f", {row.application!r}" if row.application else ""
    text = f": {mask_and_shorten_query(row.statement)}" if row.statement else ""
    role, state = row.role or "unknown role", row.holder_state or "unknown state"
    return f"session {row.holder_id} ({role}{application}, {state}{text})"


async def check_locks(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report transactions that hold locks on River's tables and have been open for too long."""
    findings = [
        warn_finding(
            f"{_describe_session(row)} locks {'all' if row.is_whole_table_locked else 'rows'} of "
            f"{format_names(row.locked_tables)} for {format_seconds(row.age_seconds)}; "
            f"{format_waiting_count(row.waiting_session_count, 'session')} for it",
            "let the program commit sooner, or end it: SELECT pg_terminate_backend"
            f"({row.holder_id})",
            pid=row.holder_id,
            role=row.role,
            application=row.application,
            state=row.holder_state,
            seconds=round(row.age_seconds, 3),
            tables=row.locked_tables,
            waiting=row.waiting_session_count,
            query=mask_and_shorten_query(row.statement),
        )
        for row in await snapshot.session.read(read_lock_holders, snapshot.schema)
        if row.age_seconds
        >= (BLOCKING_LOCK_AGE_WARN_SECONDS if row.waiting_session_count else LOCK_AGE_WARN_SECONDS)
    ]
    return findings or [ok_finding("no transaction locks River's tables for long")]
