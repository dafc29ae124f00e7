"""Rows that the server can no longer read: all other rows are claimed and stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from riverpy._log_events import DAMAGED_JOB_SKIPPED
from tests.kit.damaged_rows import DAMAGE, VALUES, damage
from tests.work.test_slow_rows import CLAIM, NAMED, RESULT, until_named

if TYPE_CHECKING:
    from riverpy import Job
    from tests.work.rig import Rig, Task


@pytest.mark.parametrize("column", VALUES)
async def test_claims_beside_a_damaged_row(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """A job with an unreadable column is logged and set aside. All others are worked."""
    monkeypatch.setattr("riverpy._postgres.skipped_rows.RETRY_DELAY_MIN", 0.05)

    rig.register_task()
    await rig.insert_rows(50)
    await damage(rig.schema, 20, column)
    async with rig.working() as client:
        await rig.take(49)
        entry = await until_named(log, NAMED[CLAIM])
        assert entry["job_id"] == 20
        assert DAMAGE in entry["error"]
        assert client.stats().queues["default"].set_aside == (20,)
    assert await rig.states() == {"available": 1, "completed": 49}


@pytest.mark.parametrize("column", ["args", "metadata", "errors"])
async def test_results_beside_a_damaged_row(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """The result of a job that became unreadable is logged and set aside. The results of all others
    are stored."""
    monkeypatch.setattr("riverpy._postgres.skipped_rows.RETRY_DELAY_MIN", 0.05)

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.id == 20:
            await damage(rig.schema, 20, column)
            raise ValueError("to be added to the errors")

    await rig.insert_rows(50)
    async with rig.working() as client:
        await rig.take(49)
        entry = await until_named(log, NAMED[RESULT])
        assert entry["job_ids"] == [20]
        assert DAMAGE in entry["error"]
        assert client.stats().results_set_aside == (20,)
        await rig.schema.execute("DELETE FROM river_job WHERE id = 20")
    assert await rig.states() == {"completed": 49}


@pytest.mark.parametrize("is_of_this_run", [True, False])
async def test_lost_claims_beside_a_damaged_row(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, is_of_this_run: bool
) -> None:
    """Claims whose answer was lost, of this run or an earlier one, are released although the server
    cannot read who claimed another running job. Its id is logged."""
    monkeypatch.setattr("riverpy._work.reconciler.CLAIM_TIMEOUT", 0.0)
    monkeypatch.setattr("riverpy._work.reconciler.RECONCILE_RETRY_DELAY", 0.05)

    rig.register_task()

    async def lose_claims() -> None:
        await rig.schema.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, attempt, attempted_by,"
            " attempted_at) SELECT 'task', 25, '{}', 'running', 1, array[$1], now()"
            " FROM generate_series(1, 20)",
            client.id,
        )
        await damage(rig.schema, 7, "attempted_by")

    client = rig.client()
    if not is_of_this_run:
        await lose_claims()
    async with rig.running(client):
        assert client._run is not None
        if is_of_this_run:
            await lose_claims()
        client._run._reconciler.schedule_check_after_failed_claim()
        await rig.take(19)
        entry = await until_named(log, DAMAGED_JOB_SKIPPED)
        assert entry["job_id"] == 7
        assert DAMAGE in entry["error"]
        assert [row.row_name for row in client._run._reconciler.skipped_rows] == ["7"]
    assert await rig.states() == {"completed": 19, "running": 1}
