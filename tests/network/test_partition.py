"""A worker host that loses its network, and gets it back."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import riverpy
from riverpy._log_events import JOB_RESULT_REFUSED
from scripts.chaos_leader import SHORT
from tests.kit.fleet import WorkerProcess, running_fleet
from tests.kit.history import STATEMENTS, check, read
from tests.network.hosts import HostServer, connected_hosts, server_url

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

SETTINGS = msgspec.structs.replace(SHORT, slots=15)
"""Slots for most of the jobs that run at once, so that both hosts have some of them."""
LIMIT = 60.0
INSERT_INTERVAL = 0.05
SECONDS = (0.1, 2.0)
"""Durations of jobs, used in turns. Some jobs end while their host is cut off."""
LONG = 10.0
"""Duration of a job that ends on the host that was cut off while the other host runs it again."""

NOTE_FINISHES = """
create table history.finish (job_id bigint, attempt int, attempted_by text, address inet);
create function history.note_finish() returns trigger language plpgsql as $$
begin
  insert into history.finish
  values (new.id, new.attempt, new.attempted_by[cardinality(new.attempted_by)], inet_client_addr());
  return null;
end $$;
create trigger note_finish after update on river_job
for each row when (new.state = 'completed') execute function history.note_finish();
"""
FINISHES = "select job_id, split_part(attempted_by, ':', 1), host(address) from history.finish"
RUNNING = """
select array_agg(id) from river_job
where state = 'running' and attempted_by[cardinality(attempted_by)] like $1 || ':%'
"""
LONG_RUNNING = """
select array_agg(job.id) from river_job as job
where state = 'running' and attempted_by[cardinality(attempted_by)] like $1 || ':%'
  and (args ->> 'seconds')::float8 = $2
  and exists (select from history.act where job_id = job.id and attempt = job.attempt)
"""
ATTEMPTS_SINCE = """
select count(*) from history.act where what = 'attempt' and process like $1 || ':%' and at > $2
"""


class DatabaseHost:
    """The database host's view of the fleet."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self.connection = connection
        self.inserted: list[int] = []

    async def fetch_until(self, holds: Callable[[Any], bool], sql: str, *values: object) -> Any:
        """Poll until the value meets the condition, and return it."""
        async with asyncio.timeout(LIMIT):
            while not holds(value := await self.connection.fetchval(sql, *values)):
                await asyncio.sleep(0.02)
        return value

    async def leader(self, among: set[str]) -> str:
        """Wait until one of these hosts is the leader."""

        def leads(leader_id: str | None) -> bool:
            return leader_id is not None and leader_id.split(":")[0] in among

        leader_id = await self.fetch_until(leads, STATEMENTS["leader"])
        return leader_id.split(":")[0]

    async def insert(self, client: riverpy.Client, seconds: float) -> None:
        """Insert a job with this duration."""
        args = json.dumps({"seconds": seconds})
        result = await client.insert(riverpy.RawArgs("touch", args))
        self.inserted.append(result.job.id)

    async def insert_jobs(self, client: riverpy.Client) -> None:
        """Insert jobs until cancelled."""
        while True:
            await self.insert(client, SECONDS[len(self.inserted) % 2])
            await asyncio.sleep(INSERT_INTERVAL)


def refused_jobs(worker: WorkerProcess) -> set[int]:
    """Return the jobs whose late results were refused, from this worker's log."""
    lines = [line for line in worker.log.read_text().splitlines() if JOB_RESULT_REFUSED in line]
    return {json.loads(line)["job_id"] for line in lines}


@pytest.mark.timeout(240)
async def test_host_is_cut_off_and_healed() -> None:
    """The leader's host loses its network without an error. The other becomes leader, runs its jobs
    again and all new ones. Late results of the first are refused, and it works again when its
    network is back. No job is lost, and each finishes once, from the host of its current attempt
    (NR-03, LD-07)."""
    async with AsyncExitStack() as stack:
        hosts = stack.enter_context(connected_hosts(3))
        places = dict(zip(("east", "west"), hosts[1:], strict=True))
        fleet = await stack.enter_async_context(running_fleet(partial(HostServer, host=hosts[0])))
        connection = await stack.enter_async_context(fleet.server.connected())
        await connection.execute(NOTE_FINISHES)
        site = DatabaseHost(connection)
        workers: dict[str, WorkerProcess] = {}
        for name, host in places.items():
            settings = msgspec.structs.replace(SETTINGS, name=name, history_url=fleet.server.url)
            log = fleet.directory / f"{name}.log"
            url = server_url(hosts[0])
            workers[name] = WorkerProcess(name, settings, url, log, enter=host.enter)
            stack.push_async_callback(workers[name].close)
            await workers[name].start()

        client = await stack.enter_async_context(riverpy.Client(fleet.server.url))
        inserting = asyncio.create_task(site.insert_jobs(client))
        stack.callback(inserting.cancel)
        cut = await site.leader(set(places))
        (other,) = set(places) - {cut}
        for name in places:
            await site.fetch_until(lambda ids: len(ids or ()) >= 3, RUNNING, name)
        while not (held := await connection.fetchval(LONG_RUNNING, cut, LONG)):
            await site.insert(client, LONG)
            await asyncio.sleep(INSERT_INTERVAL)

        places[cut].cut()
        await site.leader({other})
        await site.fetch_until(lambda ids: set(held) <= set(ids or ()), LONG_RUNNING, other, LONG)

        places[cut].heal()
        healed_at = await connection.fetchval("select now()")
        await site.fetch_until(bool, ATTEMPTS_SINCE, cut, healed_at)
        inserting.cancel()
        await site.fetch_until(lambda count: count == 0, STATEMENTS["unfinished"])
        for worker in workers.values():
            worker.terminate()
        assert [await worker.ended() for worker in workers.values()] == [0, 0]

        history = await read(connection)
        history.inserted = site.inserted
        history.validity = timedelta(seconds=SETTINGS.leader_ttl)
        assert check(history) == []
        assert set(held) <= {job.id for job in history.jobs if job.rescues}
        assert set(held) <= refused_jobs(workers[cut])
        finishes = await connection.fetch(FINISHES)
        assert sorted(job_id for job_id, _, _ in finishes) == [job.id for job in history.jobs]
        assert [row for row in finishes if row[2] != places[row[1]].address] == []
