"""What doctor reports of leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.doctor.conftest import (
    set_lease_holder,
)

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
    assert report.one("leases", "ok")["data"] == {"leases": {"a": "holder of s:a"}}
    found = report.one("leases", "warn")
    assert 'expired up to 2h ago and not acquired again: "c". Last holder' in found["text"]
    assert list(found["data"]["expired"]) == ["c"]
