"""Times transactions of one kind of session, with and without the insert of a job, as a program.

SESSION URL TRANSACTIONS NAMES   {"us": {"alone": ..., "riverpy": ...}, "reasons": {...}}

The time is that from the begin to the end of the commit. NAMES are joined by commas.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import uvloop

from scripts._bench.tx_insert.async_sessions import ASYNC_KINDS
from scripts._bench.tx_insert.names import ALONE
from scripts._bench.tx_insert.sync_sessions import SYNC_KINDS
from scripts._bench.tx_insert.timing import Timings

if TYPE_CHECKING:
    from scripts._bench.tx_insert.async_sessions import AsyncKind
    from scripts._bench.tx_insert.sync_sessions import SyncKind
    from scripts._bench.tx_insert.timing import Result


async def measure_async(session: str, url: str, transactions: int, names: set[str]) -> Result:
    """Measure an async kind of session."""
    async with ASYNC_KINDS[session](url) as kind:
        timings = Timings([ALONE, *(name for name in kind.inserts if name in names)])
        for name in timings.run_turns(transactions):
            try:
                timings.add(name, await _time_async(kind, name))
            except Exception as error:
                if name == ALONE:
                    raise
                timings.leave_out(name, error)
    return timings.result()


def measure_sync(session: str, url: str, transactions: int, names: set[str]) -> Result:
    """Measure a sync kind of session."""
    with SYNC_KINDS[session](url) as kind:
        timings = Timings([ALONE, *(name for name in kind.inserts if name in names)])
        for name in timings.run_turns(transactions):
            try:
                timings.add(name, _time_sync(kind, name))
            except Exception as error:
                if name == ALONE:
                    raise
                timings.leave_out(name, error)
    return timings.result()


async def _time_async(kind: AsyncKind, name: str) -> float:
    insert = kind.inserts.get(name)
    began = time.perf_counter()
    async with kind.transaction() as tx:
        await kind.order(tx)
        if insert is not None:
            await insert(tx)
    return time.perf_counter() - began


def _time_sync(kind: SyncKind, name: str) -> float:
    insert = kind.inserts.get(name)
    began = time.perf_counter()
    with kind.transaction() as tx:
        kind.order(tx)
        if insert is not None:
            insert(tx)
    return time.perf_counter() - began


def main(session: str, url: str, transactions: str, names: str) -> None:
    """Measure and print."""
    chosen = set(names.split(","))
    if session in SYNC_KINDS:
        found = measure_sync(session, url, int(transactions), chosen)
    else:
        found = uvloop.run(measure_async(session, url, int(transactions), chosen))
    print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
