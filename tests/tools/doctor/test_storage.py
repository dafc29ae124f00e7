"""What doctor reports of snapshots, locks, vacuum and indexes."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from riverpy._tools.doctor import storage
from riverpy._tools.doctor.statements import JobTableStatsRow, OpenSnapshotRow
from tests.tools.doctor.conftest import (
    holding,
    insert_job,
)

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_snapshot_holder(
    schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that holds an old snapshot is named with process, role, program, age and
    statement, but without literals, and the fix ends it (PF-03)."""
    statement = "SELECT count(*), 'secret' FROM river_job"
    async with holding(schema, "BEGIN ISOLATION LEVEL REPEATABLE READ", statement) as pid:
        # The server's own workers may have a snapshot too for a moment.
        assert re.match(r"\d+ open snapshot", (await doctor()).one("snapshots", "ok")["text"])
        monkeypatch.setattr(storage, "SNAPSHOT_AGE_WARN_SECONDS", 0)
        reported = (await doctor()).named("snapshots", "warn")  # other tests may hold some too
    (found,) = (one for one in reported if f"session {pid} " in one["text"])
    assert (
        f"session {pid} (postgres, 'report', idle in transaction: SELECT count(*), '…' FROM"
        in (found["text"])
    )
    assert "holds a snapshot for" in found["text"]
    assert f"pg_terminate_backend({pid})" in found["fix"]
    assert found["data"]["application"] == "report"
    assert "secret" not in str(found)
    monkeypatch.undo()
    assert str(pid) not in (await doctor()).one("snapshots", "ok")["text"]


async def test_other_snapshot_holders(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared transactions and replication slots hold snapshots too. An active slot counts only
    when it is old, by its number of transactions if its age is hidden from the role (PF-03)."""
    holders = [
        OpenSnapshotRow("prepared transaction", "order 7", "ada", "", "prepared", 90.0, 5, ""),
        OpenSnapshotRow("replication slot", "lost", "", "", "inactive", None, 3, ""),
        OpenSnapshotRow("replication slot", "used", "", "", "active", None, 3, ""),
        OpenSnapshotRow("replication slot", "slow", "", "", "active", None, 2_000_000, ""),
        OpenSnapshotRow("session", "7", "", "", "", None, 2_000_000, ""),
        OpenSnapshotRow("session", "8", "ada", "", "active", 59.0, 2_000_000, ""),
    ]

    async def read(_connection: object) -> list[OpenSnapshotRow]:
        return holders

    monkeypatch.setattr(storage, "read_open_snapshots", read)
    found = {one["data"]["id"]: one for one in (await doctor()).named("snapshots", "warn")}
    assert set(found) == {"order 7", "lost", "slow", "7"}
    assert "ROLLBACK PREPARED" in found["order 7"]["fix"]
    assert "pg_drop_replication_slot" in found["lost"]["fix"]
    assert (
        "session 7 (unknown role, unknown state) holds a snapshot: rows that died after "
        "its start (2,000,000 transactions have started since) are not removed"
        in (found["7"]["text"])
    )


async def test_locks(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that locks jobs is named, with the number of sessions that wait for it."""
    job_id = await insert_job(schema)
    update = f"UPDATE river_job SET priority = 2 WHERE id = {job_id}"
    async with holding(schema, "BEGIN", update) as pid, schema.connected() as rival:
        assert (await doctor()).named("locks", "warn") == []
        monkeypatch.setattr(storage, "BLOCKING_LOCK_AGE_WARN_SECONDS", 0)
        assert (await doctor()).named("locks", "warn") == []
        waiting_one = asyncio.create_task(rival.execute(update))
        while not await schema.fetchval(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1",
            rival.get_server_pid(),
        ):
            await asyncio.sleep(0.01)
        found = (await doctor()).named("locks", "warn")
        rival.terminate()
        await asyncio.gather(waiting_one, return_exceptions=True)
    assert [one["data"]["pid"] for one in found if one["data"]["waiting"]] == [str(pid)]
    found_one = next(one for one in found if one["data"]["waiting"])
    assert 'locks rows of "river_job"' in found_one["text"]
    assert "1 session waits for it" in found_one["text"]
    assert f"pg_terminate_backend({pid})" in found_one["fix"]


async def test_vacuum(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autovacuum that is off, for the table or the server, is reported, and so are dead rows
    that it should have removed (PF-03)."""
    dead = JobTableStatsRow(
        live_rows=10,
        dead_rows=100_001,
        seconds_since_vacuum=7200.0,
        seconds_without_vacuum=7200.0,
        is_vacuum_running=False,
        is_autovacuum_on_for_server=True,
        is_autovacuum_off_for_table=False,
    )
    rows = {
        "dead": dead,
        "new": dead._replace(seconds_since_vacuum=None, seconds_without_vacuum=599.0),
        "under way": dead._replace(is_vacuum_running=True),
        "off": dead._replace(dead_rows=1, is_autovacuum_on_for_server=False),
        "held": dead._replace(dead_rows=20),
        "live": dead._replace(live_rows=300_000, dead_rows=200_000),
    }
    await schema.execute("ALTER TABLE river_job SET (autovacuum_enabled = off)")
    try:
        found = (await doctor()).one("vacuum", "warn")
    finally:
        await schema.execute("ALTER TABLE river_job RESET (autovacuum_enabled)")
    assert "autovacuum is off for the table" in found["text"]
    assert "RESET (autovacuum_enabled)" in found["fix"]
    current = ""

    async def read(*_: object, **__: object) -> JobTableStatsRow:
        return rows[current]

    monkeypatch.setattr(storage, "read_job_table_stats", read)
    current = "dead"
    found = (await doctor()).one("vacuum", "warn")
    assert "100,001 dead rows, vacuumed 2h ago: more dead rows than live" in found["text"]
    current = "off"
    assert "ALTER SYSTEM SET autovacuum" in (await doctor()).one("vacuum", "warn")["fix"]
    for current in ("live", "new", "under way"):
        found = (await doctor()).one("vacuum", "ok")
        assert ("a vacuum runs now" in found["text"]) == (current == "under way")
    current = "held"
    assert "`snapshots`" not in (await doctor()).one("vacuum", "ok")["text"]
    monkeypatch.setattr(storage, "SNAPSHOT_AGE_WARN_SECONDS", 0)
    async with holding(schema, "BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT 1"):
        assert (
            "An older snapshot prevents their removal (`snapshots`)"
            in ((await doctor()).one("vacuum", "ok")["text"])
        )


async def test_invalid_index_and_artifact(schema: Schema, doctor: Doctor) -> None:
    """An invalid index and a missing index are failures, the remains of a rebuild are a warning,
    each with the statement that corrects it (MG-03, LM-11)."""
    await schema.execute("CREATE INDEX river_job_kind_ccnew ON river_job (kind)")
    await schema.execute("CREATE INDEX river_job_extra ON river_job (kind)")
    await schema.execute("ALTER INDEX river_job_unique_idx RENAME TO elsewhere")
    try:
        assert (await doctor()).named(
            "indexes", "warn"
        ) == []  # an index of the user may have such a name
        await schema.execute(
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid IN"
            " ('river_job_kind_ccnew'::regclass, 'river_job_extra'::regclass)"
        )
        report = await doctor()
    finally:
        await schema.execute("ALTER INDEX elsewhere RENAME TO river_job_unique_idx")
        await schema.execute("DROP INDEX river_job_kind_ccnew, river_job_extra")
    artifact = report.one("indexes", "warn")
    assert "an interrupted rebuild left river_job_kind_ccnew" in artifact["text"]
    assert f'DROP INDEX CONCURRENTLY "{schema.name}"."river_job_kind_ccnew"' in artifact["fix"]
    missing, invalid = sorted(
        report.named("indexes", "fail"), key=lambda one: "index" in one["data"]
    )
    assert invalid["fix"] == f'REINDEX INDEX CONCURRENTLY "{schema.name}"."river_job_extra"'
    assert missing["data"]["missing"] == ["river_job_unique_idx"]
    assert report.exit_code == 1


async def test_bloat(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is much larger than its estimate is reported. After a rebuild it is not."""
    monkeypatch.setattr(storage, "BLOATED_INDEX_BYTES_MIN", 100_000)
    await schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args)"
        " SELECT 'kind ' || i, 25, '{}' FROM generate_series(1, 10000) AS i"
    )
    await schema.execute("ANALYZE river_job")
    assert (await doctor()).named("indexes", "warn") == []
    await schema.execute("DELETE FROM river_job WHERE id % 500 <> 0")
    await schema.execute("VACUUM ANALYZE river_job")
    found = {one["data"]["index"]: one for one in (await doctor()).named("indexes", "warn")}
    assert {"river_job_pkey", "river_job_kind", "river_job_prioritized_fetching_index"} <= set(
        found
    )
    assert "estimated" in found["river_job_pkey"]["text"]
    await schema.execute("REINDEX TABLE river_job")
    assert (await doctor()).named("indexes", "warn") == []
