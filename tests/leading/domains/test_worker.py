"""Workers of leader domains as processes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from riverpy._log_events import WORKER_STARTED
from tests.cli.worker_process import running_worker
from tests.leading.domains.members import owners
from tests.work.rig import Rig

if TYPE_CHECKING:
    from pathlib import Path

    from tests._database import Schema


async def test_worker_of_a_domain(schema: Schema, tmp_path: Path) -> None:
    """`--leader-domain` and its variable set the domain of a worker. It claims the queues and
    becomes leader of the domain. A worker of another domain with the same queue exits with one line
    of error, as for any wrong setting."""
    rig = Rig(schema)
    where = ("jobs", f"--database-url={schema.url}", f"--schema={schema.name}", "-q", "one:1")
    async with running_worker(tmp_path, *where, RIVERPY_LEADER_DOMAIN="mail") as worker:
        started = await worker.until_logged(WORKER_STARTED)
        assert started["leader_domain"] == "mail"
        assert await owners(rig) == {"one": "mail"}
        held = "SELECT holder FROM riverpy_lease WHERE name = 'd:mail' AND expires_at >= now()"
        await rig.until(held, started["client_id"])
        async with running_worker(tmp_path, *where, "--leader-domain=pay") as other:
            assert await other.exit_code() == 2
            (line,) = [entry["text"] for entry in other.logged if "text" in entry]
            assert "queue 'one' belongs to the leader domain 'mail'" in line
        worker.send(signal.SIGTERM)
        assert await worker.exit_code() == 0
    assert await rig.schema.fetchval(held) is None
