"""What doctor reports of queues, scheduled jobs and periodic jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._tools.doctor import snapshot
from tests.tools.doctor.conftest import (
    insert_job,
    register,
    set_leader,
    set_lease_holder,
)

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_queues(schema: Schema, doctor: Doctor) -> None:
    """Every queue is in the data, also an empty one. Late, unworked and paused queues are
    reported with the reason (OP-08)."""
    await register(schema, "alive", kinds=("task",), queues=("busy", "late", "paused", "empty"))
    await register(schema, "dead", queues=("unworked", "new"), silent=100)
    await set_leader(schema, "alive")
    await schema.execute(
        "INSERT INTO river_queue (name, paused_at, updated_at) VALUES ('empty', NULL, now()),"
        " ('paused', now() - interval '1 hour', now()), ('go', NULL, now())"
    )
    await insert_job(schema, queue="busy", due=10)
    await insert_job(schema, queue="late", due=10)
    await insert_job(schema, queue="late", due=3610, priority=4)
    await insert_job(schema, queue="paused", due=1)
    await insert_job(schema, queue="go", due=700)
    await insert_job(schema, queue="unworked", due=700)
    await insert_job(schema, queue="new", due=20)
    report = await doctor()
    queues = report.one("queues", "ok")["data"]["queues"]
    assert list(queues) == ["busy", "empty", "go", "late", "new", "paused", "unworked"]
    assert queues["empty"] == {
        "available": 0,
        "oldest_due": None,
        "paused_for": None,
        "clients": 1,
    }
    assert 3610 <= queues["late"]["oldest_due"] < 3660
    found = {one["data"]["queue"]: one for one in report.named("queues") if one["level"] != "ok"}
    assert {queue: one["level"] for queue, one in found.items()} == {
        "late": "warn",
        "paused": "warn",
        "go": "warn",
        "new": "warn",
        "unworked": "fail",
    }
    assert '2 jobs of queue "late" wait, the oldest for 1h' in found["late"]["text"]
    assert "The queue is paused for 1h" in found["paused"]["text"]
    assert "riverpy queue resume paused" in found["paused"]["fix"]
    assert "A client in another language may" in found["go"]["text"]
    assert "no riverpy client works the queue" in found["unworked"]["text"]
    assert found["unworked"]["fix"] == (
        'start a worker that has kind "task": riverpy worker MODULE:ATTR -q unworked:50'
    )
    later = await doctor("--max-lag", "2h")
    assert {one["data"]["queue"] for one in later.named("queues", "warn")} == {
        "paused",
        "go",
        "new",
        "unworked",
    }


async def test_scheduled_jobs_are_late(schema: Schema, doctor: Doctor) -> None:
    """Late scheduled jobs and retries are reported. Without a leader they are a failure."""
    await insert_job(schema, "scheduled", due=-100)
    await insert_job(schema, "retryable", due=20)
    assert "2 scheduled jobs and retries" in (await doctor()).one("scheduled", "ok")["text"]
    await insert_job(schema, "scheduled", queue="mail", due=3610)
    found = (await doctor()).one("scheduled", "fail")
    assert (
        'of queue "mail" are late by up to 1h. They do not become available, because there is'
        in found["text"]
    )
    assert "`leader`" in found["fix"]
    await set_leader(schema, "go_1")
    found = (await doctor()).one("scheduled", "warn")
    assert "although there is a leader" in found["text"]
    assert "job scheduler" in found["fix"]


async def test_periodic_jobs(schema: Schema, doctor: Doctor) -> None:
    """Paused and late periodic jobs are named. One that no client uses any more is not late."""
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, paused_at, updated_at) VALUES"
        " ('soon', '1m', now() + interval '1 min', NULL, now()),"
        " ('late', '1m', now() - interval '1 hour', NULL, now()),"
        " ('paused', '1m', now() - interval '1 day', now() - interval '1 day', now()),"
        " ('unused', '1m', now() - interval '1 day', NULL, now() - interval '1 day')"
    )
    report = await doctor()
    assert report.one("periodic", "ok")["data"]["periodic_jobs"] == 4
    late, paused = sorted(report.named("periodic", "warn"), key=lambda one: one["text"])
    assert late["text"] == 'late by up to 1h: "late"'
    assert paused["text"] == 'paused, for up to 1d: "paused"'
    assert "riverpy periodic resume" in paused["fix"]


async def test_periodic_jobs_of_a_domain(schema: Schema, doctor: Doctor) -> None:
    """Late periodic jobs are reported for each domain. If the domain has no leader the finding
    says so."""
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, updated_at) SELECT id, '1m',"
        " now() - interval '1 hour', now() FROM unnest('{daily,daily@mail,daily@pay}'::text[]) id"
    )
    await set_lease_holder(schema, "d:pay", "go_1")
    found = {one["data"]["late"][0]: one for one in (await doctor()).named("periodic", "warn")}
    assert found["daily"]["text"] == 'late by up to 1h: "daily"'
    assert 'because domain "mail" has no leader' in found["daily@mail"]["text"]
    assert "start a client of domain mail" in found["daily@mail"]["fix"]
    assert found["daily@pay"]["text"] == 'late by up to 1h: "daily@pay"'
    assert "the leader of domain pay" in found["daily@pay"]["fix"]


async def test_many_queues(doctor: Doctor, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many queues fewer jobs of each are read, and the findings say "at least"."""
    monkeypatch.setattr(snapshot, "JOB_COUNT_TOTAL_MAX", 3)
    monkeypatch.setattr(snapshot, "SAMPLED_JOBS_MAX", 3)
    await register(schema, "host:1", queues=("other",), kinds=("task",))
    for queue in ("a", "b", "c"):
        for kind in ("first", "second", "third"):
            await insert_job(schema, queue=queue, kind=kind, due=900)
    report = await doctor()
    assert report.one("queues", "ok")["text"].startswith("3 queues, at least 6 jobs available")
    assert [one["text"].split(" wait")[0] for one in report.named("queues", "fail")] == [
        f'at least 2 jobs of queue "{queue}"' for queue in "abc"
    ]
    assert set(report.one("kinds", "ok")["data"]["kinds"]) == {"first", "second"}
