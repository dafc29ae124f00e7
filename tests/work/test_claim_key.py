"""Statements that end an attempt change only the row with its claim key (id, attempt, attempted_at)
and state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from riverpy._postgres.driver import use_raw_timestamps
from riverpy._postgres.job_maintenance import JobRescue, job_rescue
from riverpy._postgres.jobs import (
    AttemptResult,
    ClaimKey,
    job_complete,
    job_merge_ended_metadata,
    job_release,
    job_store_results,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests._database import Schema


async def _complete(connection: Any, schema: str, key: ClaimKey) -> object:
    return await job_complete(
        connection,
        schema,
        ids=[key.id],
        attempts=[key.attempt],
        attempted_ats=[key.attempted_at],
        seconds_since_end=[0.0],
    )


async def _settle(connection: Any, schema: str, key: ClaimKey) -> object:
    result = AttemptResult(
        *key,
        state="retryable",
        is_final=None,
        seconds_since_end=0.0,
        new_attempt=key.attempt,
        delay=60.0,
        error=None,
        metadata_updates=None,
    )
    return await job_store_results(connection, schema, [result])


async def _release(connection: Any, schema: str, key: ClaimKey) -> object:
    return await job_release(connection, schema, [key])


async def _rescue(connection: Any, schema: str, key: ClaimKey) -> object:
    return await job_rescue(connection, schema, [JobRescue(key, "me")])


async def _merge(connection: Any, schema: str, key: ClaimKey) -> object:
    return await job_merge_ended_metadata(
        connection, schema, claim_keys=[key], metadata_updates=['{"a": 1}']
    )


@pytest.mark.parametrize(
    ("statement", "state", "other_state"),
    [
        (_complete, "running", "retryable"),
        (_settle, "running", "cancelled"),
        (_release, "running", "completed"),
        (_rescue, "running", "scheduled"),
        (_merge, "completed", "running"),
    ],
    ids=["complete", "settle", "put back", "rescue", "merge"],
)
async def test_claim_key(
    schema: Schema,
    statement: Callable[[Any, str, ClaimKey], Awaitable[object]],
    state: str,
    other_state: str,
) -> None:
    """The state and each part of the key must match."""
    await schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, state, attempt, attempted_at,"
        " finalized_at) SELECT 'task', 25, '{}', state::river_job_state, 3, now(),"
        " CASE WHEN state IN ('completed', 'cancelled') THEN now() END"
        " FROM unnest($1::text[]) AS state",
        [state, other_state],
    )
    before = await schema.jobs()
    async with schema.connected() as connection:
        await use_raw_timestamps(connection)
        at = await connection.fetchval("SELECT attempted_at FROM river_job LIMIT 1")
        for wrong in (
            ClaimKey(1, 2, at),
            ClaimKey(1, 4, at),
            ClaimKey(1, 3, at - 1),
            ClaimKey(2, 3, at),
        ):
            assert not await statement(connection, schema.name, wrong)
        assert await schema.jobs() == before
        assert await statement(connection, schema.name, ClaimKey(1, 3, at))
    after = await schema.jobs()
    assert after[0] != before[0]
    assert after[1] == before[1]
