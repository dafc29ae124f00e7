"""One typed function per block of `sql/queries/river_job.sql`. They hold no logic and set no limit:
the callers do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction
    from riverpy.job import JobState

FINAL_STATES = frozenset({"cancelled", "completed", "discarded"})


class ClaimKey(NamedTuple):
    """What tells one attempt from every other. `attempted_at` is raw, so the connection must let
    timestamps cross so."""

    id: int
    attempt: int
    attempted_at: int


async def _fetch(
    connection: Transaction, name: str, schema: str | None, values: dict[str, Any]
) -> list[Record]:
    statement = query("river_job", name, schema)
    return await connection.fetch(statement.text, *statement.arguments(values))


async def job_claim(
    connection: Transaction,
    schema: str | None,
    *,
    queue: str,
    kinds: list[str] | None,
    skipped: list[int],
    after: tuple[int, int, int],
    last_priority: int,
    limit: int,
    client_id: str,
) -> list[Record]:
    """Claim up to `limit` due jobs of a queue but for the skipped ones; in no order.

    `kinds` None means all kinds.
    `after` is a priority, a raw time and an id: what comes before in the order of claims, or is
    this, is left alone, as are lower priorities than `last_priority` (larger numbers).
    """
    priority, scheduled_at, after_id = after
    return await _fetch(
        connection,
        "job_claim",
        schema,
        {
            "queue": queue,
            "kinds": kinds,
            "skipped": skipped,
            "priority": priority,
            "scheduled_at": scheduled_at,
            "after_id": after_id,
            "last_priority": last_priority,
            "limit": limit,
            "client_id": client_id,
        },
    )


async def job_claim_time(connection: Transaction, schema: str | None) -> int:
    """The server's time, raw."""
    ((now,),) = await _fetch(connection, "job_claim_time", schema, {})
    return now


async def job_next(
    connection: Transaction,
    schema: str | None,
    *,
    queue: str,
    kinds: list[str] | None,
    skipped: list[int],
) -> tuple[int, int, int] | None:
    """The priority, raw time and id of the job that a claim of one would take; locks it until the
    end of the transaction."""
    values = {"queue": queue, "kinds": kinds, "skipped": skipped}
    row = _one(await _fetch(connection, "job_next", schema, values))
    return None if row is None else (row[0], row[1], row[2])


async def job_place(
    connection: Transaction, schema: str | None, job_id: int, *, queue: str
) -> tuple[int, int, int] | None:
    """The same for this job, if it can be claimed from this queue."""
    row = _one(await _fetch(connection, "job_place", schema, {"id": job_id, "queue": queue}))
    return None if row is None else (row[0], row[1], row[2])


async def job_complete(
    connection: Transaction,
    schema: str | None,
    *,
    ids: list[int],
    attempts: list[int],
    attempted_ats: list[int],
    ages: list[float],
) -> set[int]:
    """Store completed attempts; returns the ids of those that were stored."""
    statement = query("river_job", "job_complete", schema)
    rows = await connection.fetch(statement.text, ids, attempts, attempted_ats, ages)
    return {row[0] for row in rows}


class Settlement(NamedTuple):
    """How one attempt that did not simply complete is stored. Seconds are on the server's clock."""

    id: int
    attempt: int
    attempted_at: int
    state: str
    finalize: bool | None
    age: float
    new_attempt: int
    delay: float | None
    """Until it is due again; None: its time stays."""
    error: str | None
    updates: str | None


async def job_settle(
    connection: Transaction, schema: str | None, settlements: Sequence[Settlement]
) -> dict[int, str]:
    """Store attempts of any outcome; returns the state in which each stored one ended."""
    statement = query("river_job", "job_settle", schema)
    columns = [list(column) for column in zip(*settlements, strict=True)]
    rows = await connection.fetch(statement.text, *columns)
    return {row[0]: row[1] for row in rows}


async def job_merge(
    connection: Transaction,
    schema: str | None,
    *,
    claim_keys: Sequence[ClaimKey],
    updates: list[str | None],
) -> list[Record]:
    """Merge objects, given as JSON text, into the metadata of the jobs that others made final
    during these attempts; returns the rows. Those that are locked are not among them."""
    ids, attempts, attempted_ats = (list(column) for column in zip(*claim_keys, strict=True))
    values = {"id": ids, "attempt": attempts, "attempted_at": attempted_ats, "updates": updates}
    return await _fetch(connection, "job_merge", schema, values)


async def job_tell(connection: Transaction, schema: str | None, queues: list[str]) -> None:
    """Tell the clients of these queues that a job of theirs is due again."""
    await _fetch(connection, "job_tell", schema, {"queue": queues})


async def job_lock_attempts(
    connection: Transaction, schema: str | None, ids: list[int]
) -> set[int]:
    """Lock what nobody else has locked; needs a transaction."""
    return {row[0] for row in await _fetch(connection, "job_lock_attempts", schema, {"id": ids})}


class StoredOutcome(NamedTuple):
    """Where a job stands: what tells a result that was stored from one that was refused."""

    claim_key: ClaimKey
    state: str
    errors: int
    """How many."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL_STATES


async def job_stored_outcomes(
    connection: Transaction, schema: str | None, ids: list[int]
) -> dict[int, StoredOutcome]:
    """Where those of the jobs stand that exist."""
    rows = await _fetch(connection, "job_stored_outcomes", schema, {"id": ids})
    return {row[0]: StoredOutcome(ClaimKey(row[0], row[1], row[2]), row[3], row[4]) for row in rows}


async def job_claimed_by(
    connection: Transaction,
    schema: str | None,
    *,
    queues: list[str],
    client_id: str,
    age: float,
    skipped: list[int],
) -> list[ClaimKey]:
    """The running jobs that this client claimed last, more than `age` seconds ago, but for the
    `skipped` ones."""
    rows = await _fetch(
        connection,
        "job_claimed_by",
        schema,
        {"queue": queues, "client_id": client_id, "age": age, "skipped": skipped},
    )
    return [ClaimKey(*row) for row in rows]


async def job_release(
    connection: Transaction, schema: str | None, claim_keys: Sequence[ClaimKey]
) -> set[int]:
    """Make attempts available again without counting them, and tell their queues; returns the ids
    of those that were."""
    ids, attempts, attempted_ats = (list(column) for column in zip(*claim_keys, strict=True))
    rows = await _fetch(
        connection,
        "job_release",
        schema,
        {"id": ids, "attempt": attempts, "attempted_at": attempted_ats},
    )
    return {row[0] for row in rows}


async def job_cancel_marks(
    connection: Transaction, schema: str | None, ids: list[int]
) -> list[int]:
    """Which of the running jobs somebody asked to cancel."""
    return [row[0] for row in await _fetch(connection, "job_cancel_marks", schema, {"id": ids})]


async def job_any_available(
    connection: Transaction,
    schema: str | None,
    *,
    queues: list[str],
    kinds: list[str] | None,
    skipped: list[int],
) -> bool:
    """Whether one of the queues holds an available job of these kinds that is due, but for the
    skipped ones. `kinds` None means all kinds."""
    values = {"queue": queues, "kinds": kinds, "skipped": skipped}
    ((found,),) = await _fetch(connection, "job_any_available", schema, values)
    return found


async def job_get(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """One job."""
    return _one(await job_get_many(connection, schema, [job_id]))


async def job_get_many(
    connection: Transaction, schema: str | None, ids: Sequence[int]
) -> list[Record]:
    """Those of the jobs that exist, the newest first."""
    return await _fetch(connection, "job_get", schema, {"id": list(ids)})


async def job_list(
    connection: Transaction,
    schema: str | None,
    *,
    states: Sequence[JobState],
    kinds: Sequence[str] | None,
    queues: Sequence[str] | None,
    limit: int,
) -> list[int]:
    """The ids of the newest jobs in these states; None stands for all kinds or queues."""
    values = {"state": states, "kind": kinds, "queue": queues, "limit": limit}
    return [row[0] for row in await _fetch(connection, "job_list", schema, values)]


async def job_cancel(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """Cancel a job, or mark a running one and tell its client."""
    return _one(await _fetch(connection, "job_cancel", schema, {"id": job_id}))


async def job_retry(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """Make a job available now."""
    return _one(await _fetch(connection, "job_retry", schema, {"id": job_id}))


async def job_update(
    connection: Transaction, schema: str | None, job_id: int, *, updates: str
) -> Record | None:
    """Merge an object, given as JSON text, into the metadata of a job."""
    values = {"id": job_id, "updates": updates}
    return _one(await _fetch(connection, "job_update", schema, values))


def _one(rows: list[Record]) -> Record | None:
    return rows[0] if rows else None
