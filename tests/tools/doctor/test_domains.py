"""What doctor reports of leader domains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy.migrate import Migrator
from tests.tools.doctor.conftest import (
    insert_job,
    register,
    run_doctor,
    set_leader,
    set_lease_holder,
    set_queue_owner,
)

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def two_domains(schema: Schema, *, with_default: bool = True) -> None:
    """Two healthy domains beside a healthy `default`."""
    for domain in ("mail", "report"):
        await register(schema, f"{domain}-1", domain=domain, queues=(domain,), kinds=(domain,))
        await set_lease_holder(schema, f"d:{domain}", f"{domain}-1")
        await set_queue_owner(schema, domain, domain)
    if with_default:
        await register(schema, "plain")
        await set_leader(schema, "plain")


async def test_healthy_domains(schema: Schema, doctor: Doctor) -> None:
    """Domains with a leader are ok and named. Without domains the finding says so."""
    await register(schema, "plain")
    await set_leader(schema, "plain")
    assert "only default" in (await doctor()).one("domains", "ok")["text"]
    await schema.execute("TRUNCATE riverpy_client, river_leader")
    await two_domains(schema)
    report = await doctor()
    assert report.problems() == []
    found = report.one("domains", "ok")
    assert found["text"] == '2 domains beside default: "mail", "report"'
    assert found["data"]["domains"]["mail"] == {
        "led": True,
        "clients": ["mail-1"],
        "queues": ["mail"],
    }


async def test_default_without_clients(schema: Schema, doctor: Doctor) -> None:
    """If only domains have clients, `default` needs no leader while no job waits in a queue
    without a domain."""
    await two_domains(schema, with_default=False)
    await set_lease_holder(schema, "@schema", "mail-1")
    await insert_job(schema, "scheduled", kind="mail", queue="mail", due=-60)
    report = await doctor()
    assert report.problems() == []
    assert "Other domains have running clients" in report.one("leader", "ok")["text"]
    await insert_job(schema, "scheduled", kind="mail", queue="mail", due=60)
    report = await doctor()
    assert "although there is a leader" in report.one("scheduled", "warn")["text"]
    await schema.execute("DELETE FROM riverpy_lease WHERE name = 'd:mail'")
    found = (await doctor()).one("scheduled", "fail")
    assert 'domain "mail" has no leader' in found["text"]
    await insert_job(schema, "scheduled", kind="mail", queue="other", due=60)
    report = await doctor()
    assert 'queue "other", which belongs to no domain' in report.one("leader", "warn")["text"]
    assert 'domain "mail", "default" has no leader' in report.one("scheduled", "fail")["text"]


async def test_no_leader(schema: Schema, doctor: Doctor) -> None:
    """A domain with live clients and no leader is a failure, or a warning if its clients have just
    started. It is also a failure if no client takes part in the election."""
    await register(schema, "young", domain="mail", queues=("mail",), running=-3600)
    await set_queue_owner(schema, "mail", "mail")
    text = (await doctor()).one("domains", "warn")["text"]
    assert 'domain "mail" has no leader, although 1 client could become leader: "young"' in text
    await register(schema, "old", domain="report", queues=())
    await set_lease_holder(schema, "d:report", "old", -5)
    await register(schema, "plain", candidate=False)
    report = await doctor()
    found = report.one("domains", "fail")
    assert found["data"] == {"domain": "report", "candidates": ["old"], "queues": []}
    text = report.one("leader", "fail")["text"]
    assert "no client of default takes part" in text
    await schema.execute("UPDATE riverpy_client SET candidate = false WHERE domain = 'report'")
    found = (await doctor()).one("domains", "fail")
    assert 'domain "report" has no leader, and no client of it takes part' in found["text"]
    assert "RIVERPY_CANDIDATE" in found["fix"]


async def test_domain_without_clients(schema: Schema, doctor: Doctor) -> None:
    """Queues of a domain without live clients are a failure if jobs are due and no leader maintains
    them. After a while the leader of `default` maintains them."""
    await set_queue_owner(schema, "mail", "mail", "slow", silent=90)
    found = (await doctor()).one("domains", "warn")
    assert "until 10m have passed" in found["text"]
    await insert_job(schema, queue="slow", due=5)
    found = (await doctor()).one("domains", "fail")
    assert found["data"]["due"] == ["slow"]
    await schema.execute("UPDATE riverpy_queue_owner SET last_seen_at = now() - interval '1 h'")
    found = (await doctor()).one("domains", "fail")
    assert 'no leader maintains queue "mail", "slow", because default' in found["text"]
    await set_lease_holder(schema, "@schema", "other")
    found = (await doctor()).one("domains", "warn")
    assert 'the leader of @schema maintains queue "mail", "slow"' in found["text"]
    await schema.execute("DELETE FROM riverpy_lease")
    await set_leader(schema, "plain")
    await register(schema, "plain")
    found = (await doctor()).one("domains", "warn")
    assert 'the leader of default maintains queue "mail", "slow"' in found["text"]
    assert "riverpy domain move mail --to default" in found["fix"]
    assert "riverpy worker --leader-domain mail" in found["fix"]


async def test_domain_without_clients_with_work_left(schema: Schema, doctor: Doctor) -> None:
    """Running jobs of dead clients and late periodic jobs of a domain without live clients are a
    failure."""
    await register(schema, "plain")
    await set_leader(schema, "plain")
    await register(schema, "gone", domain="mail", queues=("mail",), silent=70)
    await set_queue_owner(schema, "mail", "mail", "slow", silent=70)
    assert (await doctor()).one("domains", "warn")["data"]["unmaintained"] == ["mail", "slow"]
    await insert_job(schema, "running", client_id="gone", queue="mail", since=100)
    found = (await doctor()).one("domains", "fail")
    assert found["data"]["running"] == {"mail": 1}
    assert '1 running job of dead clients in "mail" are not rescued' in found["text"]
    await schema.execute(
        "UPDATE riverpy_queue_owner SET last_seen_at = now() - interval '1 h' WHERE queue = 'mail'"
    )
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["unmaintained"] == ["slow"]
    assert (
        'queue "slow" until 10m have passed; the leader of default maintains queue "mail"'
        in found["text"]
    )
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, updated_at)"
        " VALUES ('daily@mail', '1m', now() - interval '1 hour', now())"
    )
    found = (await doctor()).one("domains", "fail")
    assert 'which are late: "daily@mail"' in found["text"]


async def test_shared_and_unowned_queues(schema: Schema, doctor: Doctor) -> None:
    """A queue that clients of another domain work, and one that belongs to no domain, are
    reported."""
    await two_domains(schema)
    await register(schema, "stranger", queues=("mail", "default"))
    await register(schema, "more", queues=("mail", "free"), domain="report")
    shared, unowned = sorted(
        (await doctor()).named("domains", "warn"), key=lambda one: "queues" in one["data"]
    )
    assert shared["data"]["clients"] == ["stranger", "more"]
    assert shared["data"]["domains"] == ["default", "report"]
    assert "riverpy domain move mail --to default" in shared["fix"]
    assert 'clients of domain "report" work queue "free"' in unowned["text"]
    assert "riverpy domain claim free --domain report" in unowned["fix"]


async def test_settings(schema: Schema, doctor: Doctor) -> None:
    """Candidates of one domain with different settings are reported. Other clients do not count."""
    await two_domains(schema)
    await schema.execute("UPDATE riverpy_client SET settings = 'a'")
    await register(schema, "mail-2", domain="mail", settings="a", queues=("mail",))
    await register(schema, "mail-3", domain="mail", settings="b", queues=(), candidate=False)
    await register(schema, "mail-4", domain="mail", queues=(), settings=None)
    assert (await doctor()).problems() == []
    await register(schema, "mail-5", domain="mail", settings="c", queues=())
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["sets"] == [["mail-1", "mail-2"], ["mail-5"]]
    assert "rolled out" in found["fix"]


async def test_foreign_leader(schema: Schema, doctor: Doctor) -> None:
    """A leader of `default` that is not a riverpy client puts the kinds and queues of domains at
    risk. They are named."""
    await two_domains(schema, with_default=False)
    await set_leader(schema, "go_host_2026")
    await set_lease_holder(schema, "@schema", "mail-1")
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["kinds_at_risk"] == ["mail", "report"]
    assert found["data"]["queues"] == ["mail", "report"]
    assert 'also maintains queue "mail", "report"' in found["text"]


async def test_old_leader(schema: Schema, doctor: Doctor) -> None:
    """A leader or candidate of `default` that reports no support for domains is a warning if
    there are domains."""
    await register(schema, "old", settings=None)
    await set_leader(schema, "old")
    assert (await doctor()).problems() == []
    await two_domains(schema, with_default=False)
    found = (await doctor()).one("domains", "warn")
    assert "old is the leader of default and does not report support for domains" in found["text"]
    assert 'also maintains queue "mail", "report"' in found["text"]
    await register(schema, "older", settings=None)
    await register(schema, "follower", settings=None, candidate=False)
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["leader_id"] == "old"
    assert found["data"]["candidates"] == ["older"]
    await schema.execute("UPDATE riverpy_client SET settings = 'x' WHERE client_id = 'old'")
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["leader_id"] is None
    assert 'do not report support for domains: "older"' in found["text"]


async def test_schema_wide_work(schema: Schema, doctor: Doctor) -> None:
    """It is a warning if no client does the work that a schema needs once, after the clients had
    time to start."""
    await two_domains(schema, with_default=False)
    found = (await doctor()).one("domains", "warn")
    assert "no client holds @schema: indexes are not rebuilt" in found["text"]
    await set_leader(schema, "go_host_2026")
    texts = [one["text"] for one in (await doctor()).named("domains", "warn")]
    assert "no client holds @schema: rows of dead clients" in texts[1]
    await schema.execute("DELETE FROM river_leader")
    await schema.execute("UPDATE riverpy_client SET started_at = now() + interval '1 h'")
    assert (await doctor()).problems() == []


async def test_old_tables(fresh_database_url: str) -> None:
    """Without their tables domains are off, and the other checks run."""
    await Migrator(fresh_database_url).up()
    await Migrator(fresh_database_url, line="riverpy").up(target=5)
    report = await run_doctor("--database-url", fresh_database_url)
    assert "not known" in report.one("domains", "ok")["text"]
    assert "leader domains" in report.one("schema", "warn")["text"]


async def test_many_problems(
    schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many findings the worst are shown and the others are counted."""
    monkeypatch.setattr("riverpy._tools.doctor.finding.PROBLEMS_PER_CHECK_MAX", 2)
    for number in range(4):
        await set_queue_owner(schema, f"d{number}", f"q{number}", silent=60)
    texts = [one["text"] for one in (await doctor()).named("domains", "warn")]
    assert len(texts) == 3
    assert texts[-1] == "and 2 more like these"
