"""What `riverpy doctor` finds about leader, clients, and the jobs that they run or do not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._tools.doctor import snapshot as patient
from riverpy.migrate import Migrator
from tests.tools.doctor.conftest import examine, own, put, register, seat, seat_in, text_of
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor

PROGRAM = """
from typing import ClassVar
import msgspec, riverpy

class Sell(msgspec.Struct):
    kind: ClassVar[str] = "sell"

workers = riverpy.Workers()

@workers.job
async def sell(job: riverpy.Job[Sell]) -> None: ...

queues = {"default": riverpy.QueueConfig(max_workers=1)}
client = riverpy.Client("postgres://nowhere.invalid/x", workers=workers, queues=queues)
everywhere = riverpy.Client("postgres://nowhere.invalid/x", workers=workers)
"""


async def test_healthy(schema: Schema, doctor: Doctor) -> None:
    """A fleet at work has nothing that is not ok, and the exit code is 0."""
    rig = Rig(schema)
    begun, end = anyio.Event(), anyio.Event()

    async def work(job: Any) -> None:
        begun.set()
        await end.wait()

    rig.job(work)
    async with rig.working(id="one") as client, rig.working(id="two"):
        await rig.until("SELECT count(*) FROM river_leader")
        await rig.until("SELECT count(*) FROM riverpy_client", 2)
        await client.insert(Task())
        await begun.wait()
        report = await doctor()
        end.set()
    assert report.problems() == []
    assert report.exit_code == 0
    names = list(dict.fromkeys(one["name"] for one in report.findings))
    assert names == [
        *("connect", "pooler", "settings", "clock", "connections", "schema", "grants"),
        *("notifications", "listen"),
        *(
            "listeners",
            "leader",
            "domains",
            "clients",
            "stuck",
            "set aside",
            "running",
            "queues",
            "kinds",
        ),
        *("failing", "damaged", "scheduled", "periodic", "leases", "references"),
        *("snapshots", "locks", "vacuum", "indexes"),
    ]
    assert report.one("listeners", "ok")["data"]["needed"] == 2
    assert report.one("leader", "ok")["data"]["leader_id"] in {"one", "two"}
    clients = report.one("clients", "ok")["data"]["clients"]
    assert {one["client_id"]: one["alive"] for one in clients} == {"one": True, "two": True}
    assert sum(one["running_jobs"] for one in clients) == 1
    assert 'kind "task"' in report.one("running", "ok")["text"]
    assert report.one("queues", "ok")["data"]["queues"] == {
        "default": {"available": 0, "oldest_due": None, "paused_for": None, "clients": 2}
    }


async def test_no_client(doctor: Doctor) -> None:
    """Where nothing runs, that is said, with what it means."""
    report = await doctor()
    assert "nobody leads, and no client runs" in report.one("leader", "warn")["text"]
    assert "riverpy worker" in report.one("clients", "warn")["fix"]
    assert {one["name"] for one in report.problems()} == {"leader", "clients"}


async def test_no_leader_though_there_are_candidates(schema: Schema, doctor: Doctor) -> None:
    """Nobody leads and somebody could: a failure, unless they have only just begun."""
    await register(schema, "young", running=-3600)
    text = (await doctor()).one("leader", "warn")["text"]
    assert 'nobody leads, though 1 client could: "young"' in text
    await schema.execute("DELETE FROM riverpy_client")
    await register(schema, "old")
    await seat(schema, "gone", -3610)
    found = (await doctor()).one("leader", "fail")
    assert "the lease of gone has expired 1h ago" in found["text"]
    assert found["data"] == {"leader_id": None, "candidates": ["old"]}
    assert "`locks`" in found["fix"]


async def test_all_are_stopping(schema: Schema, doctor: Doctor) -> None:
    """During an ordinary stop of the last worker nobody leads, and its client is no candidate: a
    warning, and no failure. A client that works beside it could lead."""
    await register(schema, "last")
    await schema.execute("UPDATE riverpy_client SET state = 'stopping'")
    report = await doctor()
    found = report.one("leader", "warn")
    assert 'the clients that run are stopping ("last")' in found["text"]
    assert found["data"] == {"leader_id": None, "candidates": []}
    assert {one["level"] for one in report.problems()} == {"warn"}
    await register(schema, "other", domain="mail", queues=("mail",))
    await schema.execute("UPDATE riverpy_client SET state = 'stopping'")
    texts = [one["text"] for one in (await doctor()).of("domains") if one["level"] == "warn"]
    assert any("whose clients are stopping" in text for text in texts)
    await register(schema, "working")
    found = (await doctor()).one("leader", "fail")
    assert found["data"]["candidates"] == ["working"]


async def test_clock_set_back(schema: Schema, doctor: Doctor) -> None:
    """A heartbeat that is far in the future, after the server's clock was set back, is said to be
    that, and its client does not count as alive."""
    await register(schema, "old", silent=-600)
    report = await doctor()
    (found,) = [one for one in report.of("clients") if one["data"].get("client_id") == "old"]
    assert "in the future: the server's clock was set back" in found["text"]
    assert report.one("leader", "warn")["data"]["candidates"] == []


async def test_no_candidate(schema: Schema, doctor: Doctor) -> None:
    """Nobody leads and nobody stands: a failure, with what to change."""
    await register(schema, "worker", candidate=False)
    await register(schema, "dead", silent=61)
    found = (await doctor()).one("leader", "fail")
    assert "no client stands for election" in found["text"]
    assert "--no-candidate" in found["fix"]
    assert "RIVERPY_CANDIDATE" in found["fix"]


async def test_leader_is_silent(schema: Schema, doctor: Doctor) -> None:
    """A leader that gives no sign of life is told of while its lease lasts."""
    await register(schema, "leader", silent=3610)
    await seat(schema, "leader")
    assert (
        "wrote no heartbeat for 1h by the server's clock"
        in (await doctor()).one("leader", "warn")["text"]
    )


async def test_foreign_leader(schema: Schema, doctor: Doctor) -> None:
    """A leader that is no client of riverpy's puts kinds of Python at risk, which are named; where
    there are none all is well."""
    await seat(schema, "go_host_2026")
    report = await doctor()
    assert "no kind of Python's" in report.one("leader", "ok")["text"]
    assert "one of another language leads" in report.one("clients", "ok")["text"]
    assert report.exit_code == 0
    await register(schema, "python", kinds=("resize", "embed"))
    found = (await doctor()).one("leader", "warn")
    assert found["data"]["kinds_at_risk"] == ["embed", "resize"]
    assert 'At risk: "embed", "resize"' in found["text"]
    assert "docs/go.md" in found["fix"]


async def test_silent_and_dead_clients(schema: Schema, doctor: Doctor) -> None:
    """A client that gives no signs of life is told of, with what may be the matter; a dead one with
    how many of its jobs still run, which is a failure when nobody gives them back (LM-14)."""
    await register(schema, "leader")
    await seat(schema, "leader")
    for client_id, silent in (("still", 31), ("empty", 70), ("fresh", 70), ("old", 200)):
        await register(schema, client_id, silent=silent)
    await put(schema, "running", client_id="fresh", since=100)
    for _ in range(2):
        await put(schema, "running", client_id="old", since=200)
    report = await doctor()
    found = {one["data"].get("client_id"): one for one in report.of("clients")}
    assert found["still"]["level"] == "warn"
    assert "takes it for dead when it has itself seen none for 1m" in found["still"]["text"]
    assert "event loop is blocked" in found["still"]["fix"]
    assert found["empty"]["level"] == "warn"
    assert found["empty"]["data"]["running_jobs"] == 0
    assert found["fresh"]["level"] == "warn"
    assert "1 job of its still runs" in found["fresh"]["text"]
    assert found["old"]["level"] == "fail"
    assert "2 jobs of its still run: nobody gives them back" in found["old"]["text"]
    assert report.exit_code == 1


async def test_dead_client_of_a_domain(schema: Schema, doctor: Doctor) -> None:
    """Running jobs of a dead client in the queue of a domain that nobody leads: a failure at once,
    which says who gives them back and when; where the domain has a leader it does."""
    await register(schema, "leader")
    await seat(schema, "leader")
    await register(schema, "gone", domain="mail", queues=("mail",), silent=70)
    await own(schema, "mail", "mail", silent=70)
    await put(schema, "running", client_id="gone", queue="mail", since=100)
    found = (await doctor()).one("clients", "fail")
    assert 'of queue "mail", for nobody leads domain "mail", until default\'s' in found["text"]
    assert "in 8m" in found["text"]
    assert "`domains`" in found["fix"]
    await register(schema, "other", domain="mail", queues=("mail",))
    assert "seen no heartbeat for 1m" in (await doctor()).one("clients", "warn")["fix"]
    await schema.execute("UPDATE riverpy_client SET candidate = false WHERE client_id = 'other'")
    found = (await doctor()).one("clients", "fail")
    assert found["text"].endswith('those of queue "mail", for nobody leads domain "mail"')
    await seat_in(schema, "d:mail", "other")
    assert "seen no heartbeat for 1m" in (await doctor()).one("clients", "warn")["fix"]


async def test_no_listener(schema: Schema, doctor: Doctor) -> None:
    """A client that should listen and has no connection for it is told of; one that only polls, or
    gives no signs of life, needs none."""
    await register(schema, "polls")
    await register(schema, "dead", silent=61, poll_only=False)
    assert (await doctor()).one("listeners", "ok")["data"] == {"listeners": 0, "needed": 0}
    await register(schema, "listens", poll_only=False)
    found = (await doctor()).one("listeners", "warn")
    assert "1 client should listen, and there are 0 connections for that" in found["text"]
    assert "--listen-url" in found["fix"]
    assert "`LISTEN hears nothing`" in found["fix"]


async def test_stuck_jobs(schema: Schema, doctor: Doctor) -> None:
    """Jobs that a client calls stuck are told with their ids, kinds, and share of its slots: a
    failure when it works nothing any more, or nothing of a queue. They are told of once."""
    await seat(schema, "alive")
    first = await put(schema, "running", client_id="alive", since=3670)
    second = await put(schema, "running", client_id="alive", since=50)
    await put(schema, "running", client_id="alive", since=10)
    await register(schema, "alive", kinds=("task",), slots=(4,), stuck=(first, second))
    await register(schema, "dead", slots=(1,), stuck=(5,), silent=100)
    report = await doctor()
    found = report.one("stuck", "warn")
    assert (
        f"alive: 2 of 4 slots held by jobs that go on although cancelled: jobs {first}, {second} "
        '(2 of kind "task" in queue "default" for up to 1h1m)' in found["text"]
    )
    assert found["data"]["job_ids"] == [first, second]
    assert found["data"]["full_queues"] == []
    assert "restart that worker" in found["fix"]
    assert report.one("running", "ok")["data"]["running"] == 3
    await schema.execute("UPDATE riverpy_client SET slots = '{2}' WHERE client_id = 'alive'")
    found = (await doctor()).one("stuck", "fail")
    assert "2 of 2 slots held" in found["text"]
    assert "It works nothing any more" in found["text"]
    await schema.execute(
        "UPDATE riverpy_client SET slots = '{50, 2}', queues = '{mail, default}'"
        " WHERE client_id = 'alive'"
    )
    found = (await doctor()).one("stuck", "fail")
    assert 'It works nothing of queue "default" any more' in found["text"]


async def test_nobody_tells_of_stuck_jobs(schema: Schema, doctor: Doctor) -> None:
    """Where the column is not there, nothing is known of stuck jobs."""
    await register(schema, "older")
    await schema.execute("ALTER TABLE riverpy_client RENAME stuck TO hidden")
    try:
        report = await doctor()
    finally:  # the schema is used again
        await schema.execute("ALTER TABLE riverpy_client RENAME hidden TO stuck")
    assert report.one("stuck", "ok")["data"] == {"stuck": 0}


async def test_long_job(schema: Schema, doctor: Doctor) -> None:
    """A job that runs for long in a client that lives is named, with how to end it, and how many
    more there are."""
    await register(schema, "alive", kinds=("task",))
    await seat(schema, "alive")
    await put(schema, "running", client_id="alive", since=361)
    report = await doctor()
    assert report.exit_code == 0
    assert "1 job, the longest for 6m" in report.one("running", "ok")["text"]
    job_id = await put(schema, "running", client_id="alive", since=3670)
    found = (await doctor()).one("running", "warn")
    assert (
        f'job {job_id} of kind "task" in queue "default" runs for 1h1m, in alive' in found["text"]
    )
    assert f"riverpy job cancel {job_id}" in found["fix"]
    await put(schema, "running", client_id="alive", since=3600)
    assert f"job {job_id}" in (text := (await doctor()).one("running", "warn")["text"])
    assert "(and 1 more like it)" in text
    assert (await doctor("--stuck-after", "2h")).exit_code == 0


async def test_unregistered_clients(schema: Schema, doctor: Doctor) -> None:
    """Running jobs of clients that nobody knows are counted; those of an unknown kind that run for
    longer than River's hour are told of, since nobody gives them back."""
    await register(schema, "alive", kinds=("known",))
    await seat(schema, "alive")
    await put(schema, "running", kind="known", client_id="go_1", since=3601)
    await put(schema, "running", kind="foreign", client_id="go_2", since=3000)
    report = await doctor()
    assert (
        '2 jobs of clients that are not registered: "go_1", "go_2"'
        in (report.one("unregistered", "ok")["text"])
    )
    assert report.exit_code == 0
    await put(schema, "running", kind="foreign", client_id="go_1", since=3670)
    found = (await doctor()).one("unregistered", "warn")
    assert 'Those of kind "foreign" run for up to 1h1m' in found["text"]
    assert found["data"]["unknown_kinds"] == {"foreign": 2}
    assert "stub" in found["fix"]


async def test_kinds_without_worker(schema: Schema, doctor: Doctor) -> None:
    """A kind of waiting jobs that no living client has is named, in whatever state they wait."""
    await register(schema, "alive", kinds=("known",))
    await register(schema, "dead", kinds=("resize",), silent=100)
    await seat(schema, "alive")
    await put(schema, kind="known")
    for state in ("available", "retryable", "scheduled"):
        job_id = await put(schema, state, kind="resize", due=-100)
    report = await doctor()
    found = report.one("kinds", "warn")
    assert (
        'no worker of riverpy\'s has kind "resize", of which 3 jobs wait in queue "default"'
        in found["text"]
    )
    assert "another language" not in found["text"]
    assert found["data"]["job_id"] == job_id - 2
    assert "deploy a worker" in found["fix"]
    assert "wait unchanged" in found["fix"]
    assert report.one("kinds", "ok")["data"]["kinds"] == {"known": True, "resize": False}


async def test_kinds_that_the_code_lacks(
    schema: Schema, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is given is asked for its kinds: those of jobs that wait in its queues and
    that it lacks are named, whatever living clients have, or none that live."""
    (tmp_path / "shop_of_doctor.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    await put(schema, kind="sell")
    await put(schema, kind="resize")
    await put(schema, queue="images", kind="crop")
    report = await doctor("shop_of_doctor:client")
    assert "as job 2" in report.one("code", "warn")["text"]
    assert 'shop_of_doctor:client lacks kind "resize"' in report.one("code", "warn")["text"]
    assert report.one("code", "ok")["data"] == {
        "kinds": ["sell"],
        "queues": ["default"],
        "lacking": ["resize"],
    }
    report = await doctor("shop_of_doctor:everywhere")
    assert report.one("code", "ok")["data"]["lacking"] == ["crop", "resize"]
    assert (await text_of("shop_of_doctor:nothing", "--database-url", schema.url))[0] == 2
    assert not (await doctor()).of("code")


async def test_kind_that_workers_fail(schema: Schema, doctor: Doctor) -> None:
    """Jobs that clients fail because they do not have their kind are a failure, with the attempts
    that are left and the pause that saves them. Jobs of other kinds without a worker are a warning,
    also where an earlier attempt failed: they wait unchanged."""
    await register(schema, "alive", kinds=("known",))
    await seat(schema, "alive")
    unknown = "job kind is not registered in the client's Workers bundle: resize"
    for attempts in (3, 24):
        await put(schema, "retryable", kind="resize", error=unknown, attempts=attempts)
    await put(schema, "retryable", kind="shrink", error="no space left")
    await put(schema, queue="images", kind="crop")
    await schema.execute("INSERT INTO river_queue (name, updated_at) VALUES ('images', now())")
    report = await doctor()
    found = report.one("kinds", "fail")
    assert "All of them failed already, with 1 attempt left at least" in found["text"]
    assert f"The newest error: {unknown}" in found["text"]
    assert "riverpy queue pause default" in found["fix"]
    found, shrink = [one for one in report.of("kinds") if one["level"] == "warn"]
    assert "(a client in another language may have it)" in found["text"]
    assert "wait unchanged" in found["fix"]
    assert 'kind "shrink"' in shrink["text"]
    assert [one["level"] for one in report.of("failing")] == ["ok"]


async def test_failing_kinds(schema: Schema, doctor: Doctor) -> None:
    """A kind is told of that fails so that jobs are lost, or nearly, or that many fail; without the
    passwords of its errors. A job or two that failed for once are counted."""
    await register(schema, "alive", kinds=("odd", "close", "lost", "many"))
    await seat(schema, "alive")
    await put(schema, "retryable", kind="odd", due=-60, error="once")
    report = await doctor()
    assert report.problems() == []
    assert report.one("failing", "ok")["data"] == {"failed": {"odd": 1}, "discarded": {}}
    error = "cannot reach postgres://me:secret@host/db"
    await put(schema, "retryable", kind="close", due=-60, attempts=24, error=error)
    for _ in range(2):
        await put(schema, "discarded", kind="lost", attempts=25, error="boom")
    for _ in range(10):
        await put(schema, "available", kind="many", error="again")
    report = await doctor()
    found = {one["data"]["kind"]: one for one in report.of("failing", "warn")}
    assert list(found) == ["close", "lost", "many"]
    assert (
        "1 job failed and waits for the next, with 1 attempt left at least"
        in (found["close"]["text"])
    )
    assert "secret" not in found["close"]["text"]
    assert 'kind "lost" fails: 2 jobs were discarded in the last hour' in found["lost"]["text"]
    assert "riverpy job list --state discarded --kind lost" in found["lost"]["fix"]
    assert "10 jobs failed" in found["many"]["text"]


async def test_queues(schema: Schema, doctor: Doctor) -> None:
    """Every queue is told of, also an empty one: how many jobs are available, and since when the
    first of any priority is due. Late, unworked and paused ones are told with the reason
    (OP-08)."""
    await register(schema, "alive", kinds=("task",), queues=("busy", "late", "paused", "empty"))
    await register(schema, "dead", queues=("nobody", "new"), silent=100)
    await seat(schema, "alive")
    await schema.execute(
        "INSERT INTO river_queue (name, paused_at, updated_at) VALUES ('empty', NULL, now()),"
        " ('paused', now() - interval '1 hour', now()), ('go', NULL, now())"
    )
    await put(schema, queue="busy", due=10)
    await put(schema, queue="late", due=10)
    await put(schema, queue="late", due=3610, priority=4)
    await put(schema, queue="paused", due=1)
    await put(schema, queue="go", due=700)
    await put(schema, queue="nobody", due=700)
    await put(schema, queue="new", due=20)
    report = await doctor()
    queues = report.one("queues", "ok")["data"]["queues"]
    assert list(queues) == ["busy", "empty", "go", "late", "new", "nobody", "paused"]
    assert queues["empty"] == {
        "available": 0,
        "oldest_due": None,
        "paused_for": None,
        "clients": 1,
    }
    assert 3610 <= queues["late"]["oldest_due"] < 3660
    found = {one["data"]["queue"]: one for one in report.of("queues") if one["level"] != "ok"}
    assert {queue: one["level"] for queue, one in found.items()} == {
        "late": "warn",
        "paused": "warn",
        "go": "warn",
        "new": "warn",
        "nobody": "fail",
    }
    assert '2 jobs of queue "late" wait, the oldest for 1h' in found["late"]["text"]
    assert "it is paused for 1h" in found["paused"]["text"]
    assert "riverpy queue resume paused" in found["paused"]["fix"]
    assert "though one of another language may" in found["go"]["text"]
    assert "no client of riverpy's works it" in found["nobody"]["text"]
    assert found["nobody"]["fix"] == (
        'start a worker that has kind "task": riverpy worker MODULE:ATTR -q nobody:50'
    )
    later = await doctor("--max-lag", "2h")
    assert {one["data"]["queue"] for one in later.of("queues", "warn")} == {
        "paused",
        "go",
        "new",
        "nobody",
    }


async def test_scheduled_jobs_are_late(schema: Schema, doctor: Doctor) -> None:
    """Scheduled jobs and retries that nobody moves on are told of: a failure without a leader."""
    await put(schema, "scheduled", due=-100)
    await put(schema, "retryable", due=20)
    assert "2 scheduled jobs and retries" in (await doctor()).one("scheduled", "ok")["text"]
    await put(schema, "scheduled", queue="mail", due=3610)
    found = (await doctor()).one("scheduled", "fail")
    assert (
        'of queue "mail" are due for up to 1h and not moved on, and nobody leads' in (found["text"])
    )
    assert "`leader`" in found["fix"]
    await seat(schema, "somebody")
    found = (await doctor()).one("scheduled", "warn")
    assert "though there is a leader" in found["text"]
    assert "job scheduler" in found["fix"]


async def test_periodic_jobs(schema: Schema, doctor: Doctor) -> None:
    """Paused and late periodic jobs are named; one that no client has any more is not late."""
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, paused_at, updated_at) VALUES"
        " ('soon', '1m', now() + interval '1 min', NULL, now()),"
        " ('late', '1m', now() - interval '1 hour', NULL, now()),"
        " ('paused', '1m', now() - interval '1 day', now() - interval '1 day', now()),"
        " ('unused', '1m', now() - interval '1 day', NULL, now() - interval '1 day')"
    )
    report = await doctor()
    assert report.one("periodic", "ok")["data"]["periodic_jobs"] == 4
    late, paused = sorted(report.of("periodic", "warn"), key=lambda one: one["text"])
    assert late["text"] == 'late, by up to 1h: "late"'
    assert paused["text"] == 'paused, for up to 1d: "paused"'
    assert "riverpy periodic resume" in paused["fix"]


async def test_periodic_jobs_of_a_domain(schema: Schema, doctor: Doctor) -> None:
    """Late periodic jobs of a domain are told of apart: one that nobody leads is named, for no
    other leader inserts them."""
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, updated_at) SELECT id, '1m',"
        " now() - interval '1 hour', now() FROM unnest('{daily,daily@mail,daily@pay}'::text[]) id"
    )
    await seat_in(schema, "d:pay", "somebody")
    found = {one["data"]["late"][0]: one for one in (await doctor()).of("periodic", "warn")}
    assert found["daily"]["text"] == 'late, by up to 1h: "daily"'
    assert 'for nobody leads domain "mail"' in found["daily@mail"]["text"]
    assert "start a client of domain mail" in found["daily@mail"]["fix"]
    assert found["daily@pay"]["text"] == 'late, by up to 1h: "daily@pay"'
    assert "the leader of domain pay" in found["daily@pay"]["fix"]


async def test_only_rivers_line(fresh_database_url: str) -> None:
    """A database with River's line alone: what is off is said, and the rest is looked at."""
    await Migrator(fresh_database_url).up()
    report = await examine("--database-url", fresh_database_url)
    assert {one["name"] for one in report.problems()} == {"schema", "leader"}
    found = report.one("schema", "warn")
    assert "periodic jobs" in found["text"]
    assert "riverpy migrate up" in found["fix"]
    assert report.one("clients", "ok")["data"] == {"clients": None}
    assert report.one("periodic", "ok")["text"].startswith("off")


async def test_many_queues(doctor: Doctor, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many queues fewer jobs of each are read, and the findings say that there are more."""
    monkeypatch.setattr(patient, "COUNT_MOST", 3)
    monkeypatch.setattr(patient, "KINDS_MOST", 3)
    await register(schema, "host:1", queues=("other",), kinds=("task",))
    for queue in ("a", "b", "c"):
        for kind in ("first", "second", "third"):
            await put(schema, queue=queue, kind=kind, due=900)
    report = await doctor()
    assert report.one("queues", "ok")["text"].startswith("3 queues, at least 6 jobs available")
    assert [one["text"].split(" wait")[0] for one in report.of("queues", "fail")] == [
        f'at least 2 jobs of queue "{queue}"' for queue in "abc"
    ]
    assert set(report.one("kinds", "ok")["data"]["kinds"]) == {"first", "second"}


async def test_leases(schema: Schema, doctor: Doctor) -> None:
    """Leases of user code that are held are named, and one that lapsed and nobody took over is told
    of, for a day; one that was released, or has only just lapsed, is nothing."""
    for name, seconds in (
        ("s:a", 900),
        ("s:b", -1),
        ("s:c", -7200),
        ("s:d", -90_000),
        ("d:x", -120),
    ):
        await seat_in(schema, name, f"holder of {name}", seconds)
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('s:e', 1, 'x', '15 s', '-infinity')"
    )
    report = await doctor()
    assert report.one("leases", "ok")["data"] == {"leases": {"a": "holder of s:a"}}
    found = report.one("leases", "warn")
    assert 'for up to 2h, and taken over by nobody: "c", last held by' in found["text"]
    assert list(found["data"]["lapsed"]) == ["c"]
