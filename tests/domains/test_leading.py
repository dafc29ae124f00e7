"""Leaders of domains: each elected on a lease of its own, each maintaining its own queues alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.domains.members import holders, member, owners

if TYPE_CHECKING:
    from tests.work.rig import Rig

DUE = "now() - interval '1 minute'"


async def due(rig: Rig, *queues: str) -> None:
    """A scheduled job in each of these queues that is due, and that nobody can work."""
    for queue in queues:
        await rig.schema.execute(
            "INSERT INTO river_job (kind, queue, max_attempts, args, state, scheduled_at)"
            f" VALUES ('other', $1, 25, '{{}}', 'scheduled', {DUE})",
            queue,
        )


async def scheduled(rig: Rig) -> list[str]:
    """The queues with jobs that nobody has made available."""
    rows = await rig.schema.fetch(
        "SELECT DISTINCT queue FROM river_job WHERE state = 'scheduled' ORDER BY queue"
    )
    return [row["queue"] for row in rows]


async def test_life_of_a_leader(rig: Rig) -> None:
    """A client of a domain is elected on the domain's lease and tells of it; River's row of leaders
    stays untouched."""
    async with member(rig, "a", "mail") as a:
        begun = await a.leads()
        assert a.client.is_leader
        row = await rig.schema.fetchrow("SELECT * FROM riverpy_lease WHERE name = 'd:mail'")
        assert row is not None
        assert row["holder"] == "a"
        assert (begun.domain, begun.epoch) == ("mail", row["epoch"])
        assert begun.elected_at == row["acquired_at"]
        assert await owners(rig) == {"mail": "mail"}
        a.client.stop()
        ended = await a.leads(False)
        assert (ended.domain, ended.epoch) == ("mail", begun.epoch)
    assert await holders(rig) == {}
    assert await rig.schema.fetchval("SELECT count(*) FROM river_leader") == 0


async def test_each_leader_keeps_its_own_queues(rig: Rig) -> None:
    """Two domains and `default` beside each other: the leader of each schedules in its own queues,
    and in no other."""
    await due(rig, "a1", "b1", "default", "x")
    async with member(rig, "a", "a", "a1") as a:
        await a.leads()
        await rig.until("SELECT count(*) FROM river_job WHERE state = 'available'", 1)
        assert await scheduled(rig) == ["b1", "default", "x"]
        async with member(rig, "b", "b", "b1") as b:
            await b.leads()
            await rig.until("SELECT count(*) FROM river_job WHERE state = 'available'", 2)
            assert await scheduled(rig) == ["default", "x"]
            async with member(rig, "c", None) as c:
                await c.leads()
                await rig.until("SELECT count(*) FROM river_job WHERE state = 'available'", 4)
