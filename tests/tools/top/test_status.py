"""The status that `riverpy top` reads."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from riverpy import QueueConfig
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._tools.top import lease_status
from riverpy._tools.top import status as status_module
from riverpy._tools.top.status import KindWithoutWorker, StatusReader
from riverpy._tools.top.view import status_lines
from riverpy.errors import SchemaMissingError
from tests.kit import pgbouncer
from tests.kit.damaged_rows import damage
from tests.work.rig import Rig

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy._tools.top.status import OverallStatus, QueueStatus, WorkerStatus
    from tests._database import Schema


async def register(
    schema: Schema,
    client_id: str,
    *,
    queues: str,
    age: str = "0 s",
    slots: list[int] | None = None,
    stuck: list[int] | None = None,
    kinds: list[str] | None = None,
) -> None:
    """Insert a client whose last heartbeat has this age."""
    await schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, heartbeat_at, slots, stuck) VALUES ($1, $2, $6, $1 = 'alive', false, '1.2',"
        " '60 s', now() - $3::text::interval, $4, $5)",
        client_id,
        queues.split(","),
        age,
        slots,
        stuck,
        kinds or [],
    )


async def insert(schema: Schema, queue: str, state: str, columns: str, *values: str) -> None:
    """Insert one job. The values are SQL."""
    await schema.execute(
        f"INSERT INTO river_job (kind, args, max_attempts, queue, state, {columns})"
        f" VALUES ('k', '{{}}', 25, '{queue}', '{state}', {', '.join(values)})"
    )


async def set_leader(schema: Schema, leader_id: str, seconds: float) -> None:
    """Insert a leader."""
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ($1, now(), now() + make_interval(secs => $2))",
        leader_id,
        seconds,
    )


def queue_of(status: OverallStatus, name: str) -> QueueStatus:
    """Return one queue of a status."""
    (queue,) = [queue for queue in status.queues if queue.name == name]
    return queue


def worker_of(status: OverallStatus, client_id: str) -> WorkerStatus:
    """Return one worker of a status."""
    (worker,) = [worker for worker in status.workers if worker.client_id == client_id]
    return worker


async def test_queues(schema: Schema, reader: StatusReader) -> None:
    """Each queue is shown with its jobs. Paused queues and queues that a client works are shown
    without jobs too (OP-08)."""
    await schema.execute(
        "INSERT INTO river_queue (name, updated_at, paused_at) VALUES ('idle', now(), now())"
    )
    await register(schema, "alive", queues="default,worked")
    await register(schema, "gone", queues="default,left", age="61 s")
    for priority, age in ((4, 90), (1, 5), (1, -600)):
        await insert(
            schema, "default", "available", "priority, scheduled_at", str(priority),
            f"now() - interval '{age} s'",
        )  # fmt: skip
    await insert(schema, "default", "scheduled", "scheduled_at", "now() + interval '1 h'")
    await insert(schema, "other", "retryable", "scheduled_at", "now() + interval '1 h'")
    for state in ("retryable", "scheduled"):
        for age in (0, 20):
            await insert(schema, "late", state, "scheduled_at", f"now() - interval '{age} s'")
    await insert(schema, "waits", "pending", "scheduled_at", "now()")
    status = await reader.read()
    assert [queue.name for queue in status.queues] == [
        *("default", "idle", "late", "other", "waits", "worked"),
    ]
    default, idle = queue_of(status, "default"), queue_of(status, "idle")
    assert (default.available, default.scheduled, default.running, default.workers) == (3, 1, 0, 1)
    assert default.due_for is not None
    assert 90 <= default.due_for < 120
    assert not default.paused
    assert idle.paused
    assert (idle.available, idle.due_for, idle.workers) == (0, None, 0)
    assert (queue_of(status, "other").retryable, queue_of(status, "other").late) == (1, 0)
    assert (queue_of(status, "late").scheduled, queue_of(status, "late").late) == (2, 2)
    assert status.totals == {
        "available": 3, "cancelled": 0, "completed": 0, "discarded": 0, "pending": 1,
        "retryable": 3, "running": 0, "scheduled": 3,
    }  # fmt: skip


async def test_rates(schema: Schema, reader: StatusReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates count only what started, completed and failed in the last seconds."""
    monkeypatch.setattr(status_module, "RATE_WINDOW", timedelta(seconds=100))
    error = "array[json_build_object('at', to_char(now() - interval '{} s', '{}'))::jsonb]"
    rfc3339 = 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
    recent, old = error.format(2, rfc3339), error.format(300, rfc3339)
    await schema.execute("SET timezone = 'UTC'")
    for age in (1, 1, 600):
        await insert(
            schema, "q", "completed", "attempt, scheduled_at, attempted_at, finalized_at", "1",
            f"now() - interval '{age + 2} s'", f"now() - interval '{age} s'",
            f"now() - interval '{age} s'",
        )  # fmt: skip
    for age, errors in ((2, recent), (300, old)):
        at = f"now() - interval '{age} s'"
        await insert(schema, "q", "discarded", "attempted_at, finalized_at, errors", at, at, errors)
        await insert(schema, "q", "retryable", "attempt, attempted_at, errors", "1", at, errors)
        await insert(schema, "q", "available", "attempt, attempted_at, errors", "1", at, errors)
    await insert(schema, "q", "running", "attempt, attempted_at", "1", "now()")
    await insert(schema, "q", "running", "attempt, attempted_at", "1", "now() - interval '1 h'")
    queue = queue_of(status := await reader.read(), "q")
    assert status.rates_over == 100
    # Two that were completed, one that was discarded, one that runs and two that failed before.
    assert (queue.started_per_s, queue.completed_per_s, queue.failed_per_s) == (0.06, 0.02, 0.03)
    assert queue.wait_p95 is not None
    assert 1 < queue.wait_p95 <= 2


async def test_caps(schema: Schema, reader: StatusReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts end at the cap. Then the rates use the time of the counted jobs."""
    monkeypatch.setattr(status_module, "JOB_COUNT_MAX", 20)
    monkeypatch.setattr(status_module, "ENDED_JOBS_MAX", 20)
    monkeypatch.setattr(status_module, "RATE_WINDOW", timedelta(seconds=100))
    await schema.execute(
        "INSERT INTO river_job"
        " (kind, args, max_attempts, queue, state, finalized_at, attempted_at)"
        " SELECT 'k', '{}', 25, 'q', 'completed', at, at"
        " FROM (SELECT now() - i * interval '100 ms' AS at FROM generate_series(1, 90) AS i) AS _"
    )
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, queue)"
        " SELECT 'k', '{}', 25, 'q' FROM generate_series(1, 30)"
    )
    status = await reader.read()
    assert status.cap == 20
    assert queue_of(status, "q").available == 20
    assert status.totals["completed"] == 20
    assert status.rates_over < 100
    assert 0 < queue_of(status, "q").completed_per_s <= 10.01
    monkeypatch.setattr(status_module, "JOB_COUNT_TOTAL_MAX", 10)
    status = await reader.read()
    assert (status.cap, queue_of(status, "q").available) == (10, 10)


async def test_workers(schema: Schema, reader: StatusReader) -> None:
    """Live, silent and unregistered clients are shown, each with its running jobs."""
    await register(schema, "alive", queues="a,b", stuck=[1, 2])
    await register(schema, "gone", queues="a", age="61 s")
    for number, client_id in enumerate(("alive", "alive", "gone", "go", None)):
        by = "NULL" if client_id is None else f"array['before', '{client_id}']"
        since = f"now() - interval '{100 * number} s'"
        await insert(schema, "a", "running", "attempted_by, attempted_at", by, since)
    status = await reader.read()
    alive, gone = worker_of(status, "alive"), worker_of(status, "gone")
    assert (alive.state, alive.running, alive.queues) == ("alive", 2, ["a", "b"])
    assert (alive.version, alive.candidate) == ("1.2", True)
    assert alive.longest is not None
    assert 100 <= alive.longest < 200
    assert (alive.stuck, gone.stuck) == (2, 0)
    assert (gone.state, gone.running, gone.candidate) == ("silent", 1, False)
    assert gone.silent_for is not None
    assert gone.silent_for >= 61
    for client_id in ("go", ""):
        worker = worker_of(status, client_id)
        assert (worker.state, worker.running, worker.version) == ("unregistered", 1, None)
    assert status.candidates == 1


async def test_kinds_without_worker(schema: Schema, reader: StatusReader) -> None:
    """Kinds without a running client are named with their queues. Without a registered client
    none is named (FR-09)."""
    for queue in ("a", "a", "b"):
        await insert(schema, queue, "available", "priority", "1")
    await register(schema, "dead", queues="a", age="90 s", kinds=["k"])
    assert (await reader.read()).kinds_without_worker == []
    await register(schema, "alive", queues="a", kinds=["other"])
    status = await reader.read()
    assert status.kinds_without_worker == [KindWithoutWorker("k", 3, ["a", "b"])]
    assert "no running worker has k (3 in a,b)" in "\n".join(
        line.text for line in status_lines(status)
    )
    await register(schema, "new", queues="c", kinds=["k"])
    assert (await reader.read()).kinds_without_worker == []


async def test_slots(schema: Schema, reader: StatusReader) -> None:
    """The slots of live clients are added for each queue. They are not known if a client does
    not report them or the column is missing."""
    await register(schema, "alive", queues="a,b", slots=[5, 50])
    await register(schema, "other", queues="b,c", slots=[7, 1])
    await register(schema, "gone", queues="b", slots=[100], age="61 s")
    status = await reader.read()
    assert {queue.name: queue.slots for queue in status.queues} == {"a": 5, "b": 57, "c": 1}
    assert worker_of(status, "alive").slots == 55
    await register(schema, "older", queues="c")
    status = await reader.read()
    assert (queue_of(status, "b").slots, queue_of(status, "c").slots) == (57, None)
    for column in ("slots", "stuck"):
        await schema.execute(f"ALTER TABLE riverpy_client RENAME {column} TO hidden_{column}")
    try:
        status = await reader.read()
    finally:  # the schema is used again
        for column in ("slots", "stuck"):
            await schema.execute(f"ALTER TABLE riverpy_client RENAME hidden_{column} TO {column}")
    assert queue_of(status, "a").slots is None
    assert worker_of(status, "alive").slots is None


async def test_slots_of_a_client(schema: Schema, reader: StatusReader) -> None:
    """A client reports its slots when it starts."""
    rig = Rig(schema)

    rig.register_task()
    queues = {"a": QueueConfig(max_workers=3), "b": QueueConfig(max_workers=4)}
    async with rig.running(rig.client(queues=queues)):
        status = await reader.read()
    assert {queue.name: queue.slots for queue in status.queues} == {"a": 3, "b": 4}


async def test_leader(schema: Schema, reader: StatusReader) -> None:
    """The leader is shown, whether it is a riverpy client, and whether its lease has expired."""
    assert (await reader.read()).leader is None
    await set_leader(schema, "alive", 3600)
    status = await reader.read()
    assert status.leader is not None
    assert (status.leader.leader_id, status.leader.foreign) == ("alive", True)
    await register(schema, "alive", queues="a")
    status = await reader.read()
    assert status.leader is not None
    assert not status.leader.foreign
    assert 0 < status.leader.expires_in <= 3600
    await schema.execute("UPDATE river_leader SET expires_at = now() - interval '1 s'")
    status = await reader.read()
    assert status.leader is not None
    assert status.leader.expires_in < 0


async def test_domains(schema: Schema, reader: StatusReader) -> None:
    """Each domain has its leader, workers, candidates and queues. `default` has its own
    candidates. A role that may not read the tables of domains sees the rest."""
    assert (await reader.read()).domains == []
    for client_id in ("a", "m", "n"):
        await register(schema, client_id, queues="a")
    await schema.execute("UPDATE riverpy_client SET domain = 'mail' WHERE client_id <> 'a'")
    await schema.execute("UPDATE riverpy_client SET candidate = client_id <> 'n'")
    await schema.execute(
        "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by)"
        " VALUES ('mail', 'mail', 'm'), ('old', 'gone', 'g')"
    )
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('d:mail', 7, 'm', '1 h', now() + interval '1 h')"
    )
    status = await reader.read()
    assert status.candidates == 1
    gone, mail = status.domains
    assert (gone.name, gone.leader, gone.workers, gone.queues) == ("gone", None, 0, ["old"])
    assert (mail.name, mail.workers, mail.candidates, mail.queues) == ("mail", 2, 1, ["mail"])
    assert mail.leader is not None
    assert (mail.leader.leader_id, mail.leader.epoch, mail.leader.foreign) == ("m", 7, False)
    role = f"{schema.name}_reader"
    await schema.execute(f"CREATE ROLE {role}")
    try:
        await schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO {role}")
        await schema.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema.name} TO {role}")
        await schema.execute(f"REVOKE ALL ON riverpy_lease FROM {role}")
        separator = "&" if "?" in schema.url else "?"
        reader = StatusReader(f"{schema.url}{separator}role={role}", schema.name)
        status = await reader.read()
        await reader.close()
    finally:
        await schema.execute(f"DROP OWNED BY {role}")
        await schema.execute(f"DROP ROLE {role}")
    assert (status.domains, len(status.workers)) == ([], 3)


async def test_leases(
    schema: Schema, reader: StatusReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held and expired leases of user code are shown, with standbys and the lag of the current
    term. Those without a holder come first, and a limited number is shown."""
    await register(schema, "one", queues="a")
    await register(schema, "two", queues="a")
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " SELECT name, 7, 'one', '1 h', at FROM (VALUES ('s:a', now() + interval '1 h'),"
        " ('s:b', now() + interval '1 h'), ('s:c', now() - interval '1 min'),"
        " ('s:d', now() - interval '2 days'), ('s:e', '-infinity'),"
        " ('d:mail', now() + interval '1 h'), ('s:f', now() - interval '2 min')) AS v(name, at)"
    )
    await schema.execute(
        "UPDATE riverpy_client SET leases = CASE client_id"
        """ WHEN 'one' THEN '{"lags": {"s:b": {"epoch": 7, "count": 40, "age": 65,"""
        """ "reported_ago": 2}, "s:a": {"epoch": 6, "count": 1, "age": 1, "reported_ago": 2}}}'"""
        """ ELSE '{"standby": ["s:a", "s:f"]}' END::jsonb"""
    )
    status = await reader.read()
    leases = status.leases
    assert not status.leases_partial
    assert [(lease.name, lease.state, lease.standbys) for lease in leases] == [
        ("c", "expired", []),
        ("f", "expired", ["two"]),
        ("b", "held", []),
        ("a", "held", ["two"]),
    ]
    lag = leases[2].lag
    assert lag is not None
    assert (lag.count, lag.age, leases[3].lag) == (40, 65.0, None)
    assert lag.reported_ago >= 2
    assert (leases[2].holder, leases[2].epoch) == ("one", 7)
    assert -90 < leases[0].expires_in <= -60
    monkeypatch.setattr(lease_status, "SHOWN_LEASES_MAX", 3)
    status = await reader.read()
    assert ([lease.name for lease in status.leases], status.leases_left_out) == (["c", "f", "b"], 1)
    monkeypatch.setattr(lease_status, "READ_LEASES_MAX", 3)
    status = await reader.read()
    assert ([lease.name for lease in status.leases], status.leases_partial) == (
        ["c", "b", "a"],
        True,
    )
    await schema.execute("UPDATE riverpy_lease SET expires_at = '-infinity'")
    status = await reader.read()
    assert (status.leases, status.leases_partial) == ([], True)


async def test_only_river_tables(schema: Schema, reader: StatusReader) -> None:
    """Without riverpy's own tables the rest is shown, and unknown values are marked."""
    await insert(schema, "q", "running", "attempted_by", "array['go']")
    await set_leader(schema, "go", 3600)
    await schema.execute("UPDATE river_migration SET line = 'hidden' WHERE line = 'riverpy'")
    try:
        status = await reader.read()
    finally:  # the schema is used again
        await schema.execute("UPDATE river_migration SET line = 'riverpy' WHERE line = 'hidden'")
    assert (status.candidates, queue_of(status, "q").workers) == (None, None)
    assert worker_of(status, "go").running == 1
    assert status.leader is not None
    assert status.leader.foreign is None


@pytest.mark.parametrize(
    "entry", ['{"at": 7}', '{"at": "soon"}', '{"at": null}', "[]", "null", '"x"', '{"at": "9"}']
)
async def test_odd_errors(schema: Schema, reader: StatusReader, entry: str) -> None:
    """Errors with an unusual form, written by other programs, do not fail the read (MG-07)."""
    for state in ("retryable", "running", "available"):
        await insert(schema, "q", state, "attempt, errors", "2", f"array['{entry}'::jsonb]")
    for state in ("completed", "discarded", "cancelled"):
        columns = "attempt, errors, finalized_at"
        await insert(schema, "q", state, columns, "2", f"array['{entry}'::jsonb]", "now()")
    queue = queue_of(await reader.read(), "q")
    assert (queue.retryable, queue.running, queue.available) == (1, 1, 1)


async def test_no_tables(fresh_database_url: str) -> None:
    """Without River's tables the error says how to create them."""
    with pytest.raises(SchemaMissingError, match="riverpy migrate up"):
        await StatusReader(fresh_database_url, None).read()


async def test_connection_is_made_again(schema: Schema, reader: StatusReader) -> None:
    """After the connection was cut, one read fails and the next one connects again."""
    await reader.read()
    assert reader._connection is not None
    reader._connection.terminate()
    assert (await reader.read()).queues == []


async def test_failed_statement_fails_one_read(schema: Schema, reader: StatusReader) -> None:
    """A locked table fails the read at its timeout. Later reads succeed."""
    async with schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("LOCK TABLE river_job IN ACCESS EXCLUSIVE MODE")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(status_module, "STATEMENT_TIMEOUT", status_module.STATEMENT_TIMEOUT / 20)
            with pytest.raises(DATABASE_ERRORS):
                await reader.read()
        await transaction.rollback()
    assert (await reader.read()).queues == []


@pytest.fixture
def pooler_url(database_url: str) -> Generator[str]:
    """Return the URL of a pooler with one connection to this worker's database."""
    if not pgbouncer.is_installed():
        pytest.skip("pgbouncer or setpriv is not installed")
    with pgbouncer.pooled(database_url, size=1) as url:
        yield url


async def test_through_pooler(schema: Schema, pooler_url: str) -> None:
    """Reads work through a pooler in transaction mode and leave no setting behind (PB-01)."""
    reader = StatusReader(pooler_url, schema.name)
    for _ in range(3):
        assert (await reader.read()).queues == []
    assert reader._connection is not None
    for setting in ("statement_timeout", "jit", "enable_seqscan"):
        show = f"SELECT setting = reset_val FROM pg_settings WHERE name = '{setting}'"
        assert await reader._connection.fetchval(show)
    await reader.close()


async def test_damaged_rows(schema: Schema, reader: StatusReader) -> None:
    """Jobs that the server cannot read are counted and named, and the rest is shown, in each
    read until the rows are deleted."""
    claimed = ("attempted_at, attempted_by", "now()", "'{c}'")
    for state in ("available", "running", "running", "retryable", "running"):
        await insert(schema, "default", state, *claimed)
    await insert(schema, "default", "completed", "finalized_at", "now()")
    for job_id, column in {1: "errors", 2: "attempted_by", 4: "errors", 6: "errors"}.items():
        await damage(schema, job_id, column)
    await schema.execute("UPDATE river_job SET attempt = 2 WHERE id = 3")
    await damage(schema, 3, "errors")
    for _ in range(2):
        status = await reader.read()
        assert status.damaged == [1, 2, 3, 4, 6]
        assert status.totals["completed"] == 1
        queue = queue_of(status, "default")
        assert (queue.available, queue.running, queue.retryable) == (1, 3, 1)
        assert queue.completed_per_s > 0
        assert {one.client_id: one.running for one in status.workers} == {"": 2, "c": 1}
        lines = [line.text for line in status_lines(status)]
        assert any("cannot read jobs 1, 2, 3, 4, 6" in line for line in lines)
    await schema.execute("DELETE FROM river_job WHERE id <> 5")
    status = await reader.read()
    assert status.damaged == []
    assert not any("cannot read" in line.text for line in status_lines(status))
