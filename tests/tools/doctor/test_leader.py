"""What doctor reports of the leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.doctor.conftest import (
    register,
    set_leader,
)

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_no_client(doctor: Doctor) -> None:
    """Without a client, doctor warns that there is no leader and says how to start a worker."""
    report = await doctor()
    assert "there is no leader, and no client runs" in report.one("leader", "warn")["text"]
    assert "riverpy worker" in report.one("clients", "warn")["fix"]
    assert {one["name"] for one in report.problems()} == {"leader", "clients"}


async def test_no_leader_but_candidates(schema: Schema, doctor: Doctor) -> None:
    """It is a failure if there is no leader although a client could become leader, or a warning
    if that client has just started."""
    await register(schema, "young", running=-3600)
    text = (await doctor()).one("leader", "warn")["text"]
    assert 'there is no leader, although 1 client could become leader: "young"' in text
    await schema.execute("DELETE FROM riverpy_client")
    await register(schema, "old")
    await set_leader(schema, "gone", -3610)
    found = (await doctor()).one("leader", "fail")
    assert "the lease of gone expired 1h ago" in found["text"]
    assert found["data"] == {"leader_id": None, "candidates": ["old"]}
    assert "`locks`" in found["fix"]


async def test_all_clients_are_stopping(schema: Schema, doctor: Doctor) -> None:
    """It is a warning if there is no leader because the last client is stopping. It is a failure if
    another client could become leader."""
    await register(schema, "last")
    await schema.execute("UPDATE riverpy_client SET state = 'stopping'")
    report = await doctor()
    found = report.one("leader", "warn")
    assert 'all running clients are stopping ("last")' in found["text"]
    assert found["data"] == {"leader_id": None, "candidates": []}
    assert {one["level"] for one in report.problems()} == {"warn"}
    await register(schema, "other", domain="mail", queues=("mail",))
    await schema.execute("UPDATE riverpy_client SET state = 'stopping'")
    texts = [one["text"] for one in (await doctor()).named("domains") if one["level"] == "warn"]
    assert any("all its clients are stopping" in text for text in texts)
    await register(schema, "working")
    found = (await doctor()).one("leader", "fail")
    assert found["data"]["candidates"] == ["working"]


async def test_no_candidate(schema: Schema, doctor: Doctor) -> None:
    """It is a failure if no client takes part in leader election. The fix names the settings."""
    await register(schema, "worker", candidate=False)
    await register(schema, "dead", silent=61)
    found = (await doctor()).one("leader", "fail")
    assert "no client takes part in leader election" in found["text"]
    assert "--no-candidate" in found["fix"]
    assert "RIVERPY_CANDIDATE" in found["fix"]


async def test_leader_without_heartbeat(schema: Schema, doctor: Doctor) -> None:
    """A leader without a heartbeat is a warning while its lease lasts."""
    await register(schema, "leader", silent=3610)
    await set_leader(schema, "leader")
    assert (
        "wrote no heartbeat for 1h by the server's clock"
        in (await doctor()).one("leader", "warn")["text"]
    )


async def test_foreign_leader(schema: Schema, doctor: Doctor) -> None:
    """A leader that is not a riverpy client is a warning that names the kinds at risk. Without
    kinds of riverpy it is ok."""
    await set_leader(schema, "go_host_2026")
    report = await doctor()
    assert "No client has kinds here" in report.one("leader", "ok")["text"]
    assert "The leader is a client in another language" in report.one("clients", "ok")["text"]
    assert report.exit_code == 0
    await register(schema, "python", kinds=("resize", "embed"))
    found = (await doctor()).one("leader", "warn")
    assert found["data"]["kinds_at_risk"] == ["embed", "resize"]
    assert 'At risk: "embed", "resize"' in found["text"]
    assert "docs/go.md" in found["fix"]
