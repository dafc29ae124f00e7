"""What doctor reports of leases."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.tools.doctor.conftest import register, set_lease_holder

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_leases(schema: Schema, doctor: Doctor) -> None:
    """Held leases of user code are named. One that expired and was not acquired again is a
    warning for a day. One that was released or has just expired is not."""
    for name, seconds in (
        ("s:a", 900),
        ("s:b", -1),
        ("s:c", -7200),
        ("s:d", -90_000),
        ("d:x", -120),
    ):
        await set_lease_holder(schema, name, f"holder of {name}", seconds)
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('s:e', 1, 'x', '15 s', '-infinity')"
    )
    report = await doctor()
    assert report.one("leases", "ok")["data"]["leases"] == {"a": "holder of s:a"}
    found = report.one("leases", "warn")
    assert 'expired up to 2h ago and not acquired again: "c". Last holder' in found["text"]
    assert list(found["data"]["expired"]) == ["c"]


async def report_leases(schema: Schema, client_id: str, report: str | None) -> None:
    """Set what a client reports about leases."""
    await schema.execute(
        "UPDATE riverpy_client SET leases = $2::text::jsonb WHERE client_id = $1", client_id, report
    )


async def test_standbys(schema: Schema, doctor: Doctor) -> None:
    """The standbys of a held lease are information only. A lease that expired is a warning after
    10 s if it is known that no client stands by for it, and otherwise after a minute."""
    await register(schema, "one")
    await register(schema, "two")
    await set_lease_holder(schema, "s:a", "one", 900)
    await set_lease_holder(schema, "s:b", "one", 900)
    await set_lease_holder(schema, "s:c", "gone", -15)
    await set_lease_holder(schema, "s:d", "gone", -70)
    await report_leases(schema, "one", '{"standby": ["s:a"]}')
    await report_leases(schema, "two", '{"standby": ["s:b", "s:d"]}')
    report = await doctor()
    held = report.one("leases", "ok")
    assert held["data"]["standbys"] == {"a": [], "b": ["two"]}
    assert held["data"]["clients_without_report"] == []
    assert '"a" held by one (epoch 1), no running client stands by; "b" held by' in held["text"]
    assert held["text"].endswith(", 1 client stands by")
    warning = report.one("leases", "warn")
    assert list(warning["data"]["expired"]) == ["c", "d"]
    assert warning["data"]["without_standby"] == ["c"]
    assert 'No running client reports that it stands by for "c"' in warning["text"]
    await report_leases(schema, "one", None)
    report = await doctor()
    assert report.one("leases", "ok")["data"]["clients_without_report"] == ["one"]
    assert list(report.one("leases", "warn")["data"]["expired"]) == ["d"]


async def test_lag(schema: Schema, doctor: Doctor) -> None:
    """A lag whose oldest item is older than `--max-lag-age` is a warning. The time since the report
    counts, unless nothing was waiting. The lag of an earlier term is not shown."""
    await register(schema, "one")
    for name in ("old", "silent", "idle", "count", "new"):
        await set_lease_holder(schema, f"s:{name}", "one", 900)
    await set_lease_holder(schema, "s:ended", "one", -1)
    lags = {
        "s:old": (1, 7, 400.0, 1.0),
        "s:silent": (1, None, 1.0, 400.0),
        "s:idle": (1, 0, 0.0, 4000.0),
        "s:count": (1, 9, None, 1.0),
        "s:new": (2, 7, 4000.0, 1.0),
        "s:ended": (1, 7, 4000.0, 1.0),
    }
    keys = ("epoch", "count", "age", "reported_ago")
    shown = {name: dict(zip(keys, values, strict=True)) for name, values in lags.items()}
    await report_leases(schema, "one", json.dumps({"lags": shown}))
    report = await doctor()
    found = report.named("leases", "warn")
    assert [one["data"]["lease"] for one in found] == ["old", "silent"]
    assert 'the holder of "old" is behind: 7 items, the oldest 6m40s, reported' in found[0]["text"]
    assert found[0]["data"]["behind_for"] >= 401
    assert set(report.one("leases", "ok")["data"]["lags"]) == {"old", "silent", "idle", "count"}
    assert not (await doctor("--max-lag-age", "10m")).named("leases", "warn")


async def test_many_leases(schema: Schema, doctor: Doctor) -> None:
    """The text describes at most 20 leases, and counts the others."""
    for number in range(23):
        await set_lease_holder(schema, f"s:{number:02}", "one", 900)
    text = (await doctor()).one("leases", "ok")["text"]
    assert text.count("held by") == 20
    assert text.endswith("; and 3 more")
