"""The statements and the notifications for callers that wait until jobs end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._postgres.driver import Transaction

NOTIFY_END_METADATA_KEY = "riverpy:notify"
"""The metadata key of a job that a caller waits for. It requests a notification when the job
ends."""
JOB_END_TOPIC = "riverpy_job"
"""The topic of the notifications about the ends of jobs with `NOTIFY_END_METADATA_KEY`."""
JOBS_PER_PAYLOAD_MAX = 200
"""The maximum number of jobs in a notification. A payload has at most 7,999 bytes. A job takes at
most 35 of them: an id of 19 digits, a state and punctuation."""


class WaitedJobState(NamedTuple):
    """The state of a job that a caller waits for."""

    id: int
    state: str
    is_marked: bool
    """Whether the job has `NOTIFY_END_METADATA_KEY`, so that a notification is sent when it
    ends."""


class JobEndMessage(msgspec.Struct):
    """The payload of a notification about jobs that have ended."""

    jobs: list[tuple[int, str]] = []
    """The id and the final state of each job."""


async def job_get_states(
    connection: Transaction, schema: str | None, ids: list[int]
) -> list[WaitedJobState]:
    """Return the states of the jobs with these ids. Jobs that do not exist are left out."""
    rows = await get_query("riverpy_wait", "wait_states", schema).fetch(connection, id=ids)
    return [WaitedJobState(*row) for row in rows]


async def job_get_states_and_mark_waited(
    connection: Transaction, schema: str | None, ids: list[int]
) -> list[WaitedJobState]:
    """Return the states of the jobs with these ids, and mark the jobs that no client has claimed
    yet. The client that claims a marked job sends a notification when the job ends. Jobs that do
    not exist are left out. A job whose row another session has locked is not marked."""
    query = get_query("riverpy_wait", "wait_states_and_mark", schema)
    return [WaitedJobState(*row) for row in await query.fetch(connection, id=ids)]


async def job_notify_ends(
    connection: Transaction, schema: str | None, ended_jobs: Iterable[tuple[int, str]]
) -> None:
    """Notify the clients that wait for these jobs. `ended_jobs` has the id and the final state of
    each job."""
    jobs = list(ended_jobs)
    parts = [
        jobs[start : start + JOBS_PER_PAYLOAD_MAX]
        for start in range(0, len(jobs), JOBS_PER_PAYLOAD_MAX)
    ]
    payloads = [msgspec.json.encode(JobEndMessage(part)).decode() for part in parts]
    query = get_query("riverpy_wait", "wait_notify", schema)
    await query.fetch(connection, payload=payloads)


def decode_job_ends(payload: str) -> list[tuple[int, str]]:
    """Return the ids and final states of the jobs in a payload. If the payload is not valid, return
    an empty list."""
    try:
        return msgspec.json.decode(payload, type=JobEndMessage).jobs
    except (msgspec.DecodeError, RecursionError):  # any session can send any text
        return []
