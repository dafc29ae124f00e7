"""The statements on single jobs and claims: one typed function per SQL statement in
`sql/queries/river_job.sql`. The callers of these functions set timeouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy._postgres.sql_files import get_query, lists_by_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction
    from riverpy.job import JobState

FINAL_STATES = frozenset({"cancelled", "completed", "discarded"})


class ClaimKey(NamedTuple):
    """The key that identifies one attempt at a job. `attempted_at` is an integer: microseconds
    since 2000."""

    id: int
    attempt: int
    attempted_at: int


class AttemptResult(NamedTuple):
    """The values to store when an attempt at a job has ended, with any outcome."""

    id: int
    attempt: int
    attempted_at: int
    state: str
    is_final: bool | None
    seconds_since_end: float
    new_attempt: int
    delay: float | None
    """Seconds until the job is due again. None: `scheduled_at` does not change."""
    error: str | None
    metadata_updates: str | None


class StoredOutcome(NamedTuple):
    """The stored state of a job. It shows whether the result of an attempt was stored."""

    claim_key: ClaimKey
    state: str
    error_count: int
    """The number of entries in `errors`."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL_STATES


async def _fetch_rows(
    connection: Transaction, statement_name: str, schema: str | None, **values: Any
) -> list[Record]:
    return await get_query("river_job", statement_name, schema).fetch(connection, **values)


def _get_first_row(rows: list[Record]) -> Record | None:
    return rows[0] if rows else None


async def job_claim(
    connection: Transaction,
    schema: str | None,
    *,
    queue: str,
    kinds: list[str] | None,
    skipped_ids: list[int],
    after_position: tuple[int, int, int],
    priority_max: int,
    limit: int,
    client_id: str,
) -> list[Record]:
    """Claim up to `limit` due jobs of a queue. The jobs are returned in no particular order.

    Args:
        connection: a connection that reads timestamps as integers.
        schema: the schema of River's tables.
        queue: the queue.
        kinds: the kinds to claim. None means all kinds.
        skipped_ids: ids of jobs to leave out.
        after_position: claim only jobs that come after this position in the order of claims. A
            position is a priority, a `scheduled_at` in microseconds since 2000, and an id.
        priority_max: jobs with a larger priority number are left out.
        limit: the maximum number of jobs.
        client_id: the client that claims.
    """
    priority, scheduled_at, after_id = after_position
    return await _fetch_rows(
        connection,
        "job_claim",
        schema,
        queue=queue,
        kinds=kinds,
        skipped=skipped_ids,
        priority=priority,
        scheduled_at=scheduled_at,
        after_id=after_id,
        last_priority=priority_max,
        limit=limit,
        client_id=client_id,
    )


async def job_claim_queues(
    connection: Transaction,
    schema: str | None,
    *,
    queues: list[str],
    limits: list[int],
    kinds: list[str] | None,
    client_id: str,
) -> list[Record]:
    """Claim due jobs of several queues. `limits` has the maximum number of jobs for each queue, in
    the order of `queues`. `job_claim` explains the other arguments. The jobs are returned in no
    particular order."""
    return await _fetch_rows(
        connection,
        "job_claim_queues",
        schema,
        queue=queues,
        limit=limits,
        kinds=kinds,
        client_id=client_id,
    )


async def job_claim_one(
    connection: Transaction, schema: str | None, job_id: int, *, client_id: str
) -> Record | None:
    """Claim the job with this id if it is available, retryable or scheduled. The job need not be
    due. Return None if there is no such job."""
    rows = await _fetch_rows(
        connection, "job_claim_one", schema, id=str(job_id), client_id=client_id
    )
    return _get_first_row(rows)


async def job_find_next(
    connection: Transaction,
    schema: str | None,
    *,
    queues: list[str] | None,
    kinds: list[str] | None,
    at_any_time: bool,
) -> int | None:
    """Return the id of the due job that comes first in the order of claims. If no job is due,
    return None or, with `at_any_time`, the id of the job that becomes due first. If `queues` or
    `kinds` is None, all queues or all kinds are searched."""
    rows = await _fetch_rows(
        connection,
        "job_find_next",
        schema,
        at_any_time="t" if at_any_time else "f",
        queues=queues,
        kinds=kinds,
    )
    return int(rows[0][0]) if rows else None


async def job_get_server_time(connection: Transaction, schema: str | None) -> int:
    """Return the server's time, in microseconds since 2000."""
    ((now,),) = await _fetch_rows(connection, "job_claim_time", schema)
    return now


async def job_lock_next(
    connection: Transaction,
    schema: str | None,
    *,
    queue: str,
    kinds: list[str] | None,
    skipped_ids: list[int],
) -> tuple[int, int, int] | None:
    """Lock the first job that can be claimed, until the transaction ends. Return its position in
    the order of claims: priority, `scheduled_at` in microseconds since 2000, and id. Return None if
    no job can be claimed."""
    rows = await _fetch_rows(
        connection, "job_next", schema, queue=queue, kinds=kinds, skipped=skipped_ids
    )
    return (rows[0][0], rows[0][1], rows[0][2]) if rows else None


async def job_lock_and_get_claim_position(
    connection: Transaction, schema: str | None, job_id: int, *, queue: str
) -> tuple[int, int, int] | None:
    """Lock the job with this id until the transaction ends. Return its position in the order of
    claims, as `job_lock_next` does. Return None if the job is not an available and due job of
    `queue`, or if another session has locked it."""
    rows = await _fetch_rows(connection, "job_position", schema, id=job_id, queue=queue)
    return (rows[0][0], rows[0][1], rows[0][2]) if rows else None


async def job_complete(
    connection: Transaction,
    schema: str | None,
    *,
    ids: list[int],
    attempts: list[int],
    attempted_ats: list[int],
    seconds_since_end: list[float],
) -> set[int]:
    """Store completed attempts. Return the ids of the jobs whose attempt was stored."""
    values = {
        "id": ids,
        "attempt": attempts,
        "attempted_at": attempted_ats,
        "age": seconds_since_end,
    }
    return {row[0] for row in await _fetch_rows(connection, "job_complete", schema, **values)}


async def job_store_results(
    connection: Transaction, schema: str | None, results: Sequence[AttemptResult]
) -> dict[int, str]:
    """Store ended attempts, with any outcome. Return the new state of each job whose attempt was
    stored, by job id."""
    rows = await _fetch_rows(connection, "job_store_results", schema, **lists_by_field(results))
    return {row[0]: row[1] for row in rows}


async def job_merge_ended_metadata(
    connection: Transaction,
    schema: str | None,
    *,
    claim_keys: Sequence[ClaimKey],
    metadata_updates: list[str | None],
) -> list[Record]:
    """Merge metadata into the rows of jobs that another session ended, for example cancelled,
    during an attempt. `claim_keys` identify these attempts. `metadata_updates` has a JSON object as
    text for each attempt, or None to leave the metadata unchanged. Jobs that have not ended, and
    locked rows, are left out. Return the rows of the other jobs."""
    return await _fetch_rows(
        connection,
        "job_merge_metadata",
        schema,
        **lists_by_field(claim_keys),
        updates=metadata_updates,
    )


async def job_merge_running_metadata(
    connection: Transaction,
    schema: str | None,
    claim_key: ClaimKey,
    *,
    updates: str,
    lock_timeout: str | None,
) -> bool:
    """Merge `updates`, a JSON object as text, into the metadata of a running job. Return whether
    the job still runs with this claim key. `lock_timeout` is the value for PostgreSQL's setting
    `lock_timeout` in this transaction. None: the setting does not change."""
    return bool(
        await _fetch_rows(
            connection,
            "job_merge_running_metadata",
            schema,
            **_format_claim_key(claim_key),
            updates=updates,
            lock_timeout=lock_timeout,
        )
    )


async def job_store_progress(
    connection: Transaction,
    schema: str | None,
    *,
    claim_keys: Sequence[ClaimKey],
    progress_texts: list[str],
) -> set[int]:
    """Store the progress of running jobs. `progress_texts` has a JSON text for each of
    `claim_keys`. Jobs whose metadata are not an object do not change. Return the ids of the jobs
    that still run with their claim keys, and that no other session has locked."""
    rows = await _fetch_rows(
        connection,
        "job_store_progress",
        schema,
        **lists_by_field(claim_keys),
        progress=progress_texts,
    )
    return {row[0] for row in rows}


async def job_complete_with_metadata(
    connection: Transaction, schema: str | None, claim_key: ClaimKey, *, updates: str | None
) -> Record | None:
    """Complete a running job, and merge `updates`, a JSON object as text, into its metadata. Return
    its row, or None if the job no longer runs with this claim key."""
    return _get_first_row(
        await _fetch_rows(
            connection,
            "job_complete_running",
            schema,
            **_format_claim_key(claim_key),
            updates=updates,
        )
    )


def _format_claim_key(claim_key: ClaimKey) -> dict[str, str]:
    """Return the values of a claim key as texts. Integers could fail, because a connection of the
    caller may have its own codecs."""
    return {name: str(value) for name, value in claim_key._asdict().items()}


async def job_notify_queues(connection: Transaction, schema: str | None, queues: list[str]) -> None:
    """Notify the clients of these queues that a job is due again."""
    await _fetch_rows(connection, "job_notify_queues", schema, queue=queues)


class QueueDueTime(NamedTuple):
    """When available jobs of a queue become due, in seconds from now."""

    queue: str
    seconds: float


async def job_get_due_times(
    connection: Transaction, schema: str | None, queues: list[str]
) -> list[QueueDueTime]:
    """Return when available jobs of these queues become due within the next 6 seconds. The times
    are rounded up to half a second."""
    rows = await _fetch_rows(connection, "job_due_times", schema, queue=queues)
    return [QueueDueTime(*row) for row in rows]


async def job_notify_due_times(
    connection: Transaction, schema: str | None, times: list[QueueDueTime]
) -> None:
    """Notify the clients of the queues in `times` when jobs of these queues will become due."""
    queues, seconds = [one.queue for one in times], [one.seconds for one in times]
    await _fetch_rows(connection, "job_notify_due_times", schema, queue=queues, seconds=seconds)


async def job_lock_running(connection: Transaction, schema: str | None, ids: list[int]) -> set[int]:
    """Lock the running jobs with these ids until the transaction ends. Jobs that another session
    has locked are left out. Return the ids of the locked jobs."""
    return {row[0] for row in await _fetch_rows(connection, "job_lock_attempts", schema, id=ids)}


async def job_get_stored_outcomes(
    connection: Transaction, schema: str | None, ids: list[int]
) -> dict[int, StoredOutcome]:
    """Return the stored state of each job with these ids, by id. Jobs that do not exist are left
    out."""
    rows = await _fetch_rows(connection, "job_stored_outcomes", schema, id=ids)
    return {row[0]: StoredOutcome(ClaimKey(row[0], row[1], row[2]), row[3], row[4]) for row in rows}


async def job_list_claimed_by_client(
    connection: Transaction,
    schema: str | None,
    *,
    queues: list[str],
    client_id: str,
    claimed_longer_than: float,
    skipped_ids: list[int],
) -> list[ClaimKey]:
    """Return the claim keys of the running jobs in these queues that this client was the last to
    claim, more than `claimed_longer_than` seconds ago. Jobs in `skipped_ids` are left out."""
    rows = await _fetch_rows(
        connection,
        "job_claimed_by",
        schema,
        queue=queues,
        client_id=client_id,
        age=claimed_longer_than,
        skipped=skipped_ids,
    )
    return [ClaimKey(*row) for row in rows]


async def job_release(
    connection: Transaction, schema: str | None, claim_keys: Sequence[ClaimKey]
) -> set[int]:
    """Make the jobs of these attempts available again, and notify the clients of their queues. The
    number of attempts of each job is reduced by one, because the released attempt does not count. A
    job whose cancellation was requested is cancelled instead, and keeps its number of attempts.
    Return the ids of the changed jobs."""
    rows = await _fetch_rows(connection, "job_release", schema, **lists_by_field(claim_keys))
    return {row[0] for row in rows}


async def job_find_cancel_requested(
    connection: Transaction, schema: str | None, ids: list[int]
) -> list[int]:
    """Return the ids of the given jobs that are running and whose cancellation was requested."""
    return [row[0] for row in await _fetch_rows(connection, "job_cancel_marks", schema, id=ids)]


async def job_is_any_available(
    connection: Transaction,
    schema: str | None,
    *,
    queues: list[str],
    kinds: list[str] | None,
    skipped_ids: list[int],
) -> bool:
    """Whether one of the queues has an available job of one of these kinds that is due now or
    within 6 seconds. If `kinds` is None, jobs of all kinds count. Jobs in `skipped_ids` do not
    count."""
    ((found,),) = await _fetch_rows(
        connection, "job_any_available", schema, queue=queues, kinds=kinds, skipped=skipped_ids
    )
    return found


async def job_get(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """Return the row of one job, or None if there is no job with this id."""
    return _get_first_row(await job_get_many(connection, schema, [job_id]))


async def job_get_many(
    connection: Transaction, schema: str | None, ids: Sequence[int]
) -> list[Record]:
    """Return the rows of the jobs with these ids, newest first. Jobs that do not exist are left
    out."""
    return await _fetch_rows(connection, "job_get", schema, id=list(ids))


async def job_list_ids(
    connection: Transaction,
    schema: str | None,
    *,
    states: Sequence[JobState],
    kinds: Sequence[str] | None,
    queues: Sequence[str] | None,
    limit: int,
) -> list[int]:
    """Return the ids of up to `limit` jobs in these states, newest first. If `kinds` or `queues` is
    None, jobs of all kinds or all queues are returned."""
    rows = await _fetch_rows(
        connection, "job_list", schema, state=states, kind=kinds, queue=queues, limit=limit
    )
    return [row[0] for row in rows]


async def job_cancel(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """Cancel a job. If the job is running, only store in its metadata that cancellation was
    requested, and notify the client that runs it. A job that has ended does not change. Return the
    job's row, or None if there is no job with this id."""
    return _get_first_row(await _fetch_rows(connection, "job_cancel", schema, id=job_id))


async def job_retry(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """Make a job available now, without an expiry. A running job, or an available job that is due,
    does not change. Return the job's row, or None if there is no job with this id."""
    return _get_first_row(await _fetch_rows(connection, "job_retry", schema, id=job_id))


async def job_update_metadata(
    connection: Transaction, schema: str | None, job_id: int, *, metadata_updates: str
) -> Record | None:
    """Merge `metadata_updates`, a JSON object as text, into the metadata of a job. Return its row,
    or None if there is no job with this id."""
    return _get_first_row(
        await _fetch_rows(connection, "job_update", schema, id=job_id, updates=metadata_updates)
    )
