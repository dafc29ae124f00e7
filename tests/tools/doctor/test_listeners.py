"""What doctor reports of notifications."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy._tools.doctor import notifications
from tests.kit.pgbouncer import is_installed, pooled
from tests.tools.doctor.conftest import (
    register,
    set_leader,
)

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


@pytest.mark.skipif(not is_installed(), reason="pgbouncer or setpriv is not installed")
async def test_pooler(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through PgBouncer in transaction mode doctor sees the pooler and reports once that no
    notification arrives. A listen URL without the pooler works. All other checks run (PB-05)."""
    await register(schema, "deaf", poll_only=False)
    await set_leader(schema, "deaf")
    with pooled(schema.url, size=2) as url:
        with monkeypatch.context() as patch:
            patch.setattr(notifications, "TEST_NOTIFICATION_TIMEOUT", 0.2)  # it never comes
            report = await doctor(url=url)
        assert report.one("pooler", "ok")["data"] == {"is_pooled": True}
        found = report.one("listen", "warn")
        assert "pooler in transaction mode" in found["text"]
        assert "Config(pooler=True, listen_url=…)" in found["fix"]
        assert "see `listen`" in report.one("listeners", "ok")["text"]
        assert len(report.problems()) == 1
        report = await doctor("--listen-url", schema.url, url=url)
        assert "over the listen URL" in report.one("listen", "ok")["text"]
        assert {one["name"] for one in report.problems()} == {"listeners"}
    found = (await doctor("--listen-url", "postgresql://h:secret@127.0.0.1:1/d")).one(
        "listen", "warn"
    )
    assert "cannot connect" in found["text"]
    assert "secret" not in str(found)


async def test_no_listener(schema: Schema, doctor: Doctor) -> None:
    """A client that should listen and has no connection for it is a warning. Clients that only
    poll or are dead need none."""
    await register(schema, "polls")
    await register(schema, "dead", silent=61, poll_only=False)
    assert (await doctor()).one("listeners", "ok")["data"] == {"listeners": 0, "needed": 0}
    await register(schema, "listens", poll_only=False)
    found = (await doctor()).one("listeners", "warn")
    assert "1 client should listen, but there are only 0 connections for LISTEN" in found["text"]
    assert "--listen-url" in found["fix"]
    assert "`notifications not received`" in found["fix"]
