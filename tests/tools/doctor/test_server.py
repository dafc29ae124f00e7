"""What doctor reports of the server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from riverpy._tools.doctor import server
from riverpy._tools.doctor.statements import ServerRow
from riverpy.migrate import migrate_all
from tests._database import connected
from tests.tools.doctor.conftest import (
    run_doctor,
)

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_read_only_server(fresh_database_url: str) -> None:
    """A read-only server is a failure, and the other checks still run (NR-12)."""
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    report = await run_doctor("--database-url", fresh_database_url)
    assert "the server is read-only" in report.one("connect", "fail")["text"]
    assert "reset" in report.one("connect", "fail")["fix"].lower()
    assert report.named("indexes", "ok") != []
    assert not [one for one in report.findings if "this check failed" in one["text"]]


async def test_standby(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby is a failure whose fix names the parameter that avoids it. No job is checked there
    (NR-12)."""

    async def read(_connection: object) -> ServerRow:
        return ServerRow(
            "18.1", is_standby=True, is_read_only=True, session_role="ada", session_pid=1
        )

    monkeypatch.setattr(server, "read_server", read)
    report = await doctor()
    assert "a standby" in report.one("connect", "fail")["text"]
    assert "target_session_attrs=primary" in report.one("connect", "fail")["fix"]
    assert report.findings[-1]["name"] == "schema"


async def test_settings(fresh_database_url: str) -> None:
    """Settings of the role or database that end normal work are reported with their source. A high
    timeout and `synchronous_commit` are not reported."""
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection:
        name = await connection.fetchval("SELECT current_database()")
        for setting in (
            "statement_timeout = '200ms'",
            "idle_session_timeout = '5s'",
            "default_transaction_isolation = 'serializable'",
            "lock_timeout = '1min'",
            "synchronous_commit = off",
        ):
            await connection.execute(f'ALTER DATABASE "{name}" SET {setting}')
    report = await run_doctor("--database-url", fresh_database_url)
    found = {one["data"]["setting"]: one for one in report.named("settings", "warn")}
    assert set(found) == {
        "statement_timeout",
        "idle_session_timeout",
        "default_transaction_isolation",
    }
    assert "statement_timeout is 0.2s, set by the database" in found["statement_timeout"]["text"]
    assert "SET statement_timeout = '5s'" in found["statement_timeout"]["fix"]
    assert "'read committed'" in found["default_transaction_isolation"]["fix"]
    url = f"{fresh_database_url}&statement_timeout=300"
    found = {
        one["data"]["setting"]: one
        for one in (await run_doctor("--database-url", url)).named("settings")
    }
    assert "from the URL" in found["statement_timeout"]["fix"]


async def test_clock(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong clock is reported with the direction and the error of the measurement."""
    monkeypatch.setattr(server, "local_utc_now", lambda: datetime.now(UTC) + timedelta(minutes=1))
    found = (await doctor()).one("clock", "warn")
    assert "ahead of the server" in found["text"]
    assert abs(found["data"]["skew"] - 60) < 1 + found["data"]["error"]
    assert "NTP" in found["fix"]
    monkeypatch.setattr(server, "local_utc_now", lambda: datetime.now(UTC) - timedelta(minutes=1))
    assert "behind the server" in (await doctor()).one("clock", "warn")["text"]


async def test_latency_and_connections(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow round trip and a lack of connections are reported."""
    monkeypatch.setattr(server, "LATENCY_WARN_SECONDS", 0)
    monkeypatch.setattr(server, "CONNECTION_USAGE_WARN", 0)
    report = await doctor()
    assert "a round trip is slow" in report.one("connect", "warn")["text"]
    found = report.one("connections", "warn")
    assert found["data"]["used"] >= found["data"]["own"] >= 1
    assert "max_connections" in found["fix"]
    monkeypatch.setattr(server, "CONNECTION_USAGE_FAIL", 0)
    assert "may refuse new connections" in (await doctor()).one("connections", "fail")["text"]
