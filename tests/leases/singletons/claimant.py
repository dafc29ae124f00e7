"""A process whose client runs, and claims a key for a function that never ends.

python -m tests.leases.singletons.claimant URL SCHEMA KEY
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from riverpy import Claim, Client, Config, Job, QueueConfig, Workers

DEAD_AFTER = timedelta(seconds=6)

workers = Workers()


@workers.job(kind="nothing")
async def do_nothing(job: Job[dict[str, int]]) -> None:
    """A client without a worker does not run."""


async def claim_for_ever(url: str, schema: str, key: str) -> None:
    """Claim the key, print this, and wait."""

    async def wait(claim: Claim) -> None:
        print(claim.epoch, flush=True)
        await asyncio.Event().wait()

    config = Config(schema=schema, id="claimant", candidate=False, dead_after=DEAD_AFTER)
    client = Client(url, workers=workers, queues={"default": QueueConfig()}, config=config)
    async with client, client.working():
        await client.run_at_most_once(key, wait)


if __name__ == "__main__":
    asyncio.run(claim_for_ever(*sys.argv[1:]))
