"""What doctor reports of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.doctor.conftest import (
    insert_job,
    register,
    set_leader,
    set_lease_holder,
    set_queue_owner,
)

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_clock_set_back(schema: Schema, doctor: Doctor) -> None:
    """A heartbeat far in the future means that the server's clock was set back. Its client does not
    count as alive."""
    await register(schema, "old", silent=-600)
    report = await doctor()
    (found,) = [one for one in report.named("clients") if one["data"].get("client_id") == "old"]
    assert "in the future: the server's clock was set back" in found["text"]
    assert report.one("leader", "warn")["data"]["candidates"] == []


async def test_late_and_dead_clients(schema: Schema, doctor: Doctor) -> None:
    """A late client is a warning. A dead client is reported with its running jobs, and that is a
    failure if no leader rescues them (LM-14)."""
    await register(schema, "leader")
    await set_leader(schema, "leader")
    for client_id, silent in (("still", 31), ("empty", 70), ("fresh", 70), ("old", 200)):
        await register(schema, client_id, silent=silent)
    await insert_job(schema, "running", client_id="fresh", since=100)
    for _ in range(2):
        await insert_job(schema, "running", client_id="old", since=200)
    report = await doctor()
    found = {one["data"].get("client_id"): one for one in report.named("clients")}
    assert found["still"]["level"] == "warn"
    assert (
        "treats it as dead when the leader itself has seen no heartbeat for 1m"
        in found["still"]["text"]
    )
    assert "event loop is blocked" in found["still"]["fix"]
    assert found["empty"]["level"] == "warn"
    assert found["empty"]["data"]["running_jobs"] == 0
    assert found["fresh"]["level"] == "warn"
    assert "1 job that it claimed is still running" in found["fresh"]["text"]
    assert found["old"]["level"] == "fail"
    assert (
        "2 jobs that it claimed are still running, and no leader rescues them"
        in found["old"]["text"]
    )
    assert report.exit_code == 1
    await schema.execute("DELETE FROM riverpy_client WHERE client_id IN ('leader', 'still')")
    await schema.execute("DELETE FROM river_leader")
    found = {one["data"].get("client_id"): one for one in (await doctor()).named("clients")}
    for client_id in ("fresh", "old"):
        assert found[client_id]["fix"] == "start a worker: riverpy worker MODULE:ATTR"


async def test_dead_client_of_a_domain(schema: Schema, doctor: Doctor) -> None:
    """Running jobs of a dead client are a failure at once if the domain of their queue has no
    leader. The finding says when they will be rescued."""
    await register(schema, "leader")
    await set_leader(schema, "leader")
    await register(schema, "gone", domain="mail", queues=("mail",), silent=70)
    await set_queue_owner(schema, "mail", "mail", silent=70)
    await insert_job(schema, "running", client_id="gone", queue="mail", since=100)
    found = (await doctor()).one("clients", "fail")
    assert (
        'of queue "mail", because domain "mail" has no leader (the leader of default'
        in found["text"]
    )
    assert "in 8m" in found["text"]
    assert "`domains`" in found["fix"]
    await register(schema, "other", domain="mail", queues=("mail",))
    assert "seen no heartbeat for 1m" in (await doctor()).one("clients", "warn")["fix"]
    await schema.execute("UPDATE riverpy_client SET candidate = false WHERE client_id = 'other'")
    found = (await doctor()).one("clients", "fail")
    assert found["text"].endswith('those of queue "mail", because domain "mail" has no leader')
    await set_lease_holder(schema, "d:mail", "other")
    assert "seen no heartbeat for 1m" in (await doctor()).one("clients", "warn")["fix"]
