"""What `riverpy doctor` finds about leader domains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy.migrate import Migrator
from tests.tools.doctor.conftest import examine, own, put, register, seat, seat_in

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def two_domains(schema: Schema, *, with_default: bool = True) -> None:
    """Two domains that are well, beside a default that is."""
    for domain in ("mail", "report"):
        await register(schema, f"{domain}-1", domain=domain, queues=(domain,), kinds=(domain,))
        await seat_in(schema, f"d:{domain}", f"{domain}-1")
        await own(schema, domain, domain)
    if with_default:
        await register(schema, "plain")
        await seat(schema, "plain")


async def test_well(schema: Schema, doctor: Doctor) -> None:
    """Domains with a leader each are ok, and named; without domains that is said."""
    await register(schema, "plain")
    await seat(schema, "plain")
    assert "none but default" in (await doctor()).one("domains", "ok")["text"]
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


async def test_domains_alone(schema: Schema, doctor: Doctor) -> None:
    """Where only domains have clients nobody need lead default, while no job waits in a queue that
    no domain has; late jobs of a led domain's queues are no matter of default's."""
    await two_domains(schema, with_default=False)
    await seat_in(schema, "@schema", "mail-1")
    await put(schema, "scheduled", kind="mail", queue="mail", due=-60)
    report = await doctor()
    assert report.problems() == []
    assert "its domains are led apart" in report.one("leader", "ok")["text"]
    await put(schema, "scheduled", kind="mail", queue="mail", due=60)
    report = await doctor()
    assert "though there is a leader" in report.one("scheduled", "warn")["text"]
    await schema.execute("DELETE FROM riverpy_lease WHERE name = 'd:mail'")
    found = (await doctor()).one("scheduled", "fail")
    assert 'nobody leads domain "mail"' in found["text"]
    await put(schema, "scheduled", kind="mail", queue="other", due=60)
    report = await doctor()
    assert 'queue "other", which no domain has' in report.one("leader", "warn")["text"]
    assert 'nobody leads domain "mail", "default"' in report.one("scheduled", "fail")["text"]


async def test_no_leader(schema: Schema, doctor: Doctor) -> None:
    """A domain with living clients and no leader is a failure, unless they have only just begun,
    and so is one of which nobody stands; and default of which nobody does, whoever stands for
    domains."""
    await register(schema, "young", domain="mail", queues=("mail",), running=-3600)
    await own(schema, "mail", "mail")
    text = (await doctor()).one("domains", "warn")["text"]
    assert 'nobody leads domain "mail", though 1 client could: "young"' in text
    await register(schema, "old", domain="report", queues=())
    await seat_in(schema, "d:report", "old", -5)
    await register(schema, "plain", candidate=False)
    report = await doctor()
    found = report.one("domains", "fail")
    assert found["data"] == {"domain": "report", "candidates": ["old"], "queues": []}
    text = report.one("leader", "fail")["text"]
    assert "no client of default, whose queues the domains' leaders do not keep, stands" in text
    await schema.execute("UPDATE riverpy_client SET candidate = false WHERE domain = 'report'")
    found = (await doctor()).one("domains", "fail")
    assert 'nobody leads domain "report", and no client of it stands' in found["text"]
    assert "RIVERPY_CANDIDATE" in found["fix"]


async def test_deserted(schema: Schema, doctor: Doctor) -> None:
    """Queues of a domain without a living client: a failure if jobs are due and nobody keeps them;
    once they are orphaned a leader of default does."""
    await own(schema, "mail", "mail", "slow", silent=90)
    found = (await doctor()).one("domains", "warn")
    assert "until 10m have passed nobody keeps" in found["text"]
    await put(schema, queue="slow", due=5)
    found = (await doctor()).one("domains", "fail")
    assert found["data"]["due"] == ["slow"]
    await schema.execute("UPDATE riverpy_queue_owner SET last_seen_at = now() - interval '1 h'")
    found = (await doctor()).one("domains", "fail")
    assert 'nobody keeps queue "mail", "slow", for no client of' in found["text"]
    await seat_in(schema, "@schema", "other")
    found = (await doctor()).one("domains", "warn")
    assert 'the leader of @schema keeps queue "mail", "slow"' in found["text"]
    await schema.execute("DELETE FROM riverpy_lease")
    await seat(schema, "plain")
    await register(schema, "plain")
    found = (await doctor()).one("domains", "warn")
    assert 'the leader of default keeps queue "mail", "slow"' in found["text"]
    assert "riverpy domain move mail --to default" in found["fix"]
    assert "riverpy worker --leader-domain mail" in found["fix"]


async def test_deserted_with_work_left(schema: Schema, doctor: Doctor) -> None:
    """What a domain leaves behind that nobody does is a failure: running jobs of its dead clients
    until others keep its queues, and its periodic jobs, which nobody else inserts."""
    await register(schema, "plain")
    await seat(schema, "plain")
    await register(schema, "gone", domain="mail", queues=("mail",), silent=70)
    await own(schema, "mail", "mail", "slow", silent=70)
    assert (await doctor()).one("domains", "warn")["data"]["unkept"] == ["mail", "slow"]
    await put(schema, "running", client_id="gone", queue="mail", since=100)
    found = (await doctor()).one("domains", "fail")
    assert found["data"]["running"] == {"mail": 1}
    assert '1 running job of dead clients in "mail" wait' in found["text"]
    await schema.execute(
        "UPDATE riverpy_queue_owner SET last_seen_at = now() - interval '1 h' WHERE queue = 'mail'"
    )
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["unkept"] == ["slow"]
    assert 'nobody keeps queue "slow"; the leader of default keeps queue "mail"' in found["text"]
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, updated_at)"
        " VALUES ('daily@mail', '1m', now() - interval '1 hour', now())"
    )
    found = (await doctor()).one("domains", "fail")
    assert 'which nobody else inserts: "daily@mail"' in found["text"]


async def test_conflicts(schema: Schema, doctor: Doctor) -> None:
    """A queue that clients of another domain work too, and one that clients of a domain work and no
    domain has, are told of."""
    await two_domains(schema)
    await register(schema, "stranger", queues=("mail", "default"))
    await register(schema, "more", queues=("mail", "free"), domain="report")
    shared, unowned = sorted(
        (await doctor()).of("domains", "warn"), key=lambda one: "queues" in one["data"]
    )
    assert shared["data"]["clients"] == ["stranger", "more"]
    assert shared["data"]["domains"] == ["default", "report"]
    assert "riverpy domain move mail --to default" in shared["fix"]
    assert 'clients of domain "report" work queue "free"' in unowned["text"]
    assert "riverpy domain claim free --domain report" in unowned["fix"]


async def test_settings(schema: Schema, doctor: Doctor) -> None:
    """Candidates of one domain that would keep it differently are told of; others do not count."""
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
    """A leader of default that knows of no domain puts kinds and queues at risk, which are
    named."""
    await two_domains(schema, with_default=False)
    await seat(schema, "go_host_2026")
    await seat_in(schema, "@schema", "mail-1")
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["kinds_at_risk"] == ["mail", "report"]
    assert found["data"]["queues"] == ["mail", "report"]
    assert 'keeps queue "mail", "report" too' in found["text"]


async def test_old_leader(schema: Schema, doctor: Doctor) -> None:
    """A client of default that leads it, or may, and does not say that it knows of domains, is told
    of where there are some."""
    await register(schema, "old", settings=None)
    await seat(schema, "old")
    assert (await doctor()).problems() == []
    await two_domains(schema, with_default=False)
    found = (await doctor()).one("domains", "warn")
    assert "old leads default and does not say that it knows of domains" in found["text"]
    assert 'keeps queue "mail", "report" too' in found["text"]
    await register(schema, "older", settings=None)
    await register(schema, "follower", settings=None, candidate=False)
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["leader_id"] == "old"
    assert found["data"]["candidates"] == ["older"]
    await schema.execute("UPDATE riverpy_client SET settings = 'x' WHERE client_id = 'old'")
    found = (await doctor()).one("domains", "warn")
    assert found["data"]["leader_id"] is None
    assert 'who could lead default does not say that it knows of domains: "older"' in found["text"]


async def test_schema_wide_work(schema: Schema, doctor: Doctor) -> None:
    """That nobody does what a schema has one of is told, once somebody had the time to begin."""
    await two_domains(schema, with_default=False)
    found = (await doctor()).one("domains", "warn")
    assert "nobody holds @schema: indexes are not rebuilt" in found["text"]
    await seat(schema, "go_host_2026")
    texts = [one["text"] for one in (await doctor()).of("domains", "warn")]
    assert "nobody holds @schema: dead clients are not forgotten" in texts[1]
    await schema.execute("DELETE FROM river_leader")
    await schema.execute("UPDATE riverpy_client SET started_at = now() + interval '1 h'")
    assert (await doctor()).problems() == []


async def test_old_tables(fresh_database_url: str) -> None:
    """Without their tables domains are off, and the rest is looked at."""
    await Migrator(fresh_database_url).up()
    await Migrator(fresh_database_url, line="riverpy").up(target=5)
    report = await examine("--database-url", fresh_database_url)
    assert "not known" in report.one("domains", "ok")["text"]
    assert "leader domains" in report.one("schema", "warn")["text"]


async def test_many_problems(
    schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many findings the worst are shown, and how many there are more."""
    monkeypatch.setattr("riverpy._tools.doctor.finding.FINDINGS_SHOWN", 2)
    for number in range(4):
        await own(schema, f"d{number}", f"q{number}", silent=60)
    texts = [one["text"] for one in (await doctor()).of("domains", "warn")]
    assert len(texts) == 3
    assert texts[-1] == "and 2 more like these"
