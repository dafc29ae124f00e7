"""The page of leaders, domains, leases and singletons."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from riverpy import Client, Config
from riverpy._dashboard import status_cache
from riverpy._log_events import DASHBOARD_MADE_A_CHANGE
from riverpy.migrate import Migrator
from riverpy.web import dashboard
from tests.dashboard.site_kit import Browser
from tests.tools.doctor.conftest import register, set_leader, set_lease_holder, set_queue_owner

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema


async def test_leaders(schema: Schema, log: list[dict[str, Any]]) -> None:
    """The page shows the leader of each domain with its term, candidates and queues, the problems
    that the checks found, and the leases, first those that need attention. A sentence on top says
    what to do."""
    await register(schema, "plain-1")
    await register(schema, "mail-1", domain="mail", queues=("mail",))
    await register(schema, "mail-2", domain="mail", queues=("plain",), candidate=False)
    await set_leader(schema, "plain-1")
    await set_lease_holder(schema, "d:mail", "mail-1")
    await set_queue_owner(schema, "mail", "mail")
    await set_queue_owner(schema, "orders", "orders")
    for name, holder, seconds in (("s:held", "mail-1", 900), ("s:<b>", "gone", -70)):
        await set_lease_holder(schema, name, holder, seconds)
    report = {"standby": ["s:held"]}
    await schema.execute(
        "UPDATE riverpy_client SET leases = $1::text::jsonb WHERE client_id = 'plain-1'",
        json.dumps(report),
    )
    async with (
        Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client,
        Browser(dashboard(client)) as browser,
    ):
        assert "The checks run now" in await browser.see("/leader")
        page = await browser.see("/leader")
        for text in (
            *("plain-1 has been the leader", "The domain orders has no leader", "no leader</span>"),
            *("mail-1", "&lt;b&gt;", "have no holder", "warning"),
            *("orders", "no client of domain", "What to do:", "all that no other domain owns"),
        ):
            assert text in page, text
        assert page.index("&lt;b&gt;</th>") < page.index("held</th>")
        assert "Domains are not known" not in page
        for domain, lease in (("default", "river_leader"), ("mail", "riverpy_lease")):
            fields = {"domain": domain}
            question = await browser.submit(page, "/leader/resign", **fields)
            assert f"Let the leader of {domain} resign?" in question.text, lease
            fields["confirmed"] = "yes"
            answer = await browser.submit(question.text, "/leader/resign", **fields)
            assert f"The leader of {domain} was asked to resign" in answer.text
        for domain, status in (("@schema", 400), ("unknown", 404)):
            answer = await browser.submit(page, "/leader/resign", domain=domain)
            assert answer.status_code == status
    changes = [one for one in log if one["event"] == DASHBOARD_MADE_A_CHANGE]
    assert [(one["action"], one["target"]) for one in changes] == [
        *[("resign leader", "default"), ("resign leader", "mail")]
    ]


async def test_older_tables(fresh_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without riverpy's own tables, or with those of an older version, all pages are useful, and
    say what is missing. After a migration they need no restart."""
    monkeypatch.setattr(status_cache, "TABLE_CHECK_INTERVAL", 0.0)
    monkeypatch.setattr(status_cache, "STATUS_AGE_MAX", 0.0)
    monkeypatch.setattr(status_cache, "STATUS_PAUSE_FACTOR", 0.0)
    await Migrator(fresh_database_url).up()
    async with Client(fresh_database_url) as client, Browser(dashboard(client)) as browser:
        for version, unknown in ((0, True), (4, True), (5, True), (6, False)):
            if version:
                await Migrator(fresh_database_url, line="riverpy").up(target=version)
            await browser.see("/leader")
            page = await browser.see("/leader")
            assert ("Domains are not known" in page) == unknown
            assert "There is no leader" in page
            assert "riverpy migrate up" in await browser.see("/doctor")
            assert ("Workers are not known" in await browser.see("/")) == (version == 0)
