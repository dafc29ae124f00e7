"""What doctor shows of stuck jobs and rows that clients have set aside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from riverpy._maintenance import batch_runner
from riverpy._tools.doctor.finding import PROBLEMS_PER_CHECK_MAX
from riverpy._tools.top.status import StatusReader
from riverpy.migrate import Migrator
from tests.tools.doctor.conftest import (
    insert_job,
    register,
    set_leader,
)
from tests.work.rig import Rig

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor

REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF NEW.id = 1 AND NEW.state = 'running' OR NEW.id = 2 AND OLD.state = 'running'
OR NEW.id = 3 AND OLD.state = 'scheduled' THEN
RAISE 'refused for postgres://ada:secret@db/x' USING ERRCODE = '58030';
END IF; RETURN NEW; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON river_job FOR EACH ROW EXECUTE FUNCTION refuse()
"""


async def test_stuck_jobs(schema: Schema, doctor: Doctor) -> None:
    """Stuck jobs are reported with their ids, kinds and slots. They are a failure if they use
    all slots of a client or of a queue. The check `running` does not repeat them."""
    await set_leader(schema, "alive")
    first = await insert_job(schema, "running", client_id="alive", since=3670)
    second = await insert_job(schema, "running", client_id="alive", since=50)
    await insert_job(schema, "running", client_id="alive", since=10)
    await register(schema, "alive", kinds=("task",), slots=(4,), stuck=(first, second))
    await register(schema, "dead", slots=(1,), stuck=(5,), silent=100)
    report = await doctor()
    found = report.one("stuck", "warn")
    assert (
        f"alive: cancelled jobs that still run use 2 of 4 slots: jobs {first}, {second} "
        '(2 of kind "task" in queue "default" for up to 1h1m)' in found["text"]
    )
    assert found["data"]["job_ids"] == [first, second]
    assert found["data"]["full_queues"] == []
    assert "restart that worker" in found["fix"]
    assert report.one("running", "ok")["data"]["running"] == 3
    await schema.execute("UPDATE riverpy_client SET slots = '{2}' WHERE client_id = 'alive'")
    found = (await doctor()).one("stuck", "fail")
    assert "use 2 of 2 slots" in found["text"]
    assert "This client can work no other job" in found["text"]
    await schema.execute(
        "UPDATE riverpy_client SET slots = '{50, 2}', queues = '{mail, default}'"
        " WHERE client_id = 'alive'"
    )
    found = (await doctor()).one("stuck", "fail")
    assert 'This client can work no other job of queue "default"' in found["text"]


async def test_stuck_column_is_missing(schema: Schema, doctor: Doctor) -> None:
    """Without the column, no stuck job is known."""
    await register(schema, "older")
    await schema.execute("ALTER TABLE riverpy_client RENAME stuck TO hidden")
    try:
        report = await doctor()
    finally:  # the schema is used again
        await schema.execute("ALTER TABLE riverpy_client RENAME hidden TO stuck")
    assert report.one("stuck", "ok")["data"] == {"stuck": 0}


async def test_set_aside_column_is_missing(schema: Schema, doctor: Doctor) -> None:
    """Without version 7 of riverpy's tables, doctor reports that such rows are not known."""
    migrator = Migrator(schema.url, schema=schema.name, line="riverpy")
    await migrator.down(target=6)
    try:
        await register(schema, "alive")
        found = (await doctor()).one("set aside", "ok")
    finally:  # the schema is used again
        await migrator.up()
    assert found["data"] == {"rows": None}
    assert (await doctor()).one("set aside", "ok")["data"] == {"rows": 0}


async def test_set_aside_rows_of_each_error(schema: Schema, doctor: Doctor) -> None:
    """A live client has one finding for each error of each operation, with the oldest time, the
    most tries and the number of unnamed rows. Only a limited number of findings is shown."""
    rows = [
        {"what": what, "row": row, "error": error, "tries": tries, "since": f"2026-01-0{day}"}
        for what, row, error, tries, day in (
            ("claim", "1", "full", 2, 5),
            ("claim", "2", "full", 7, 4),
            ("claim", "3", "locked", 2, 3),
            ("result", "4", "full", 2, 3),
        )
    ]
    aside = json.dumps({"count": 24, "rows": rows})
    for client_id, silent in (("alive", 0), ("dead", 600)):
        await register(schema, client_id, silent=silent)
    await schema.execute("UPDATE riverpy_client SET set_aside = $1::text::jsonb", aside)
    found = [one["data"] for one in (await doctor()).named("set aside", "warn")]
    assert [
        (one["what"], one["error"], one["rows"], one["since"], one["tries"]) for one in found
    ] == [
        ("claim", "full", ["1", "2"], "2026-01-04", 7),
        ("claim", "locked", ["3"], "2026-01-03", 2),
        ("result", "full", ["4"], "2026-01-03", 2),
    ]
    assert {(one["client_id"], one["unnamed"]) for one in found} == {("alive", 20)}
    many = [{**rows[0], "error": str(n)} for n in range(PROBLEMS_PER_CHECK_MAX + 2)]
    aside = json.dumps({"count": len(many), "rows": many})
    await schema.execute("UPDATE riverpy_client SET set_aside = $1::text::jsonb", aside)
    found = [one["data"] for one in (await doctor()).named("set aside", "warn")]
    assert len(found) == PROBLEMS_PER_CHECK_MAX + 1
    assert found[-1] == {"more": 2}


async def test_set_aside_rows_of_a_worker(
    schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the server refuses to a claim, a result or a maintenance service are shown until
    they succeed."""
    monkeypatch.setattr("riverpy._postgres.skipped_rows.RETRY_DELAY_MIN", 0.05)
    monkeypatch.setattr(batch_runner, "ROW_RETRY_DELAY_MIN", 0.05)
    rig = Rig(schema)

    rig.register_task()
    await rig.insert_rows(5)
    await schema.execute(
        "UPDATE river_job SET state = 'scheduled', scheduled_at = now() - interval '1 minute'"
        " WHERE id = 3"
    )
    await schema.execute(REFUSE)
    try:
        async with rig.working(id="one"):
            await rig.until("SELECT (set_aside ->> 'count')::int FROM riverpy_client", 3)
            found = {
                one["data"]["what"]: one for one in (await doctor()).named("set aside", "warn")
            }
            assert {what: one["data"]["rows"] for what, one in found.items()} == {
                "claim": ["1"],
                "result": ["2"],
                "making due jobs available": ["3"],
            }
            for one in found.values():
                assert "refused for postgres://ada:***@db/x" in one["text"]
                assert one["data"]["since"] in one["text"]
                assert one["data"]["tries"] > 1
                assert "remove the cause" in one["fix"]
            reader = StatusReader(schema.url, schema.name)
            status = await reader.read()
            await reader.close()
            assert [worker.aside for worker in status.workers] == [3]
            await schema.execute("DROP FUNCTION refuse CASCADE")
            await rig.until("SELECT count(*) FROM riverpy_client WHERE set_aside IS NULL", 1)
            await rig.until("SELECT count(*) FROM river_job WHERE state = 'completed'", 5)
        assert await rig.states() == {"completed": 5}
    finally:
        await schema.execute("DROP FUNCTION IF EXISTS refuse CASCADE")
