"""Injects random faults into a fleet of workers, and checks that it broke no rule."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

from scripts import chaos_leader, chaos_leases, chaos_work
from tests.kit.lease_chaos import Break

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEADER_EPILOG = """
Each worker is `riverpy worker` with a fault proxy of its own before a PostgreSQL of its own. The
leader's maintenance has one service more, which writes rows under the term's fence; clients insert
jobs, and three periodic jobs are due each second. The server restarts and crashes, its clock is
stepped, rows of jobs are slow or refused. Workers record what they do, past the proxy. Afterwards
everything is mended and must work again; then it is checked:

  no overlap of terms            by what their processes said and did; after a crash of the server,
                                 whose table of leaders is empty then, and after a step of its
                                 clock, by which leases end early, a trust's time may overlap
  no write of an older term      committed after the begin or a write of a newer
  every slot as its policy says  none twice, none early; `all` has each, `one` and `skip` the newest
  every job completed            one attempt and one for each rescue, none lost, no attempt twice
  a rescue has a reason          a fault that hit the worker; not a step of the clock, nor a bad row

Exit code: 0 nothing was found, 1 violations (the workers' logs and the history are kept), 2 wrong
usage.
"""


_WORK_EPILOG = """
Jobs of many kinds are inserted in every way: singly, in batches, by COPY, in transactions some of
which are rolled back. Each worker is `riverpy worker` with a role and a fault proxy of its own
before a PostgreSQL of its own. Backends of each of its connections are killed and frozen, networks
are cut, the server restarts, crashes, stays down, refuses, is full, is read-only, has timeouts set,
its clock is stepped; users lock rows and fill pools, and have triggers that make rows slow or
refuse them; workers are killed, stopped and frozen, also with jobs in processes and with a blocked
event loop. What handlers do is written to files as they do it. Afterwards every job must end; then
it is checked:

  jobs        no committed one lost, nothing of a transaction that was rolled back, what is unique
              once, what is cancelled ended
  results     one that ends a job, one of each claim, and what was stored stays
  attempts    each has an error but the last; each error, rescue and repetition has a reason: a
              crash of the server excuses claims of its last second, which are not durable; a step
              of its clock and a bad row excuse no rescue
  children    end with their worker, and no attempt runs beside the next
  going on    no restart of ours; each worker stores results within 5 s of the end of what hit it,
              and no job that is due waits for longer
  logs        one line an outage and one a recovery, no traceback, no storm

Exit code: 0 nothing was found, 1 violations (the workers' logs, their acts and the history are
kept), 2 wrong usage.
"""


_LEASES_EPILOG = """
Each worker is `riverpy worker` with a fault proxy of its own before a PostgreSQL of its own. All
want the same leases, some by hand and some for singletons, and half of them the lead of one domain,
half that of another. Whoever holds one writes under it, through its fence, whatever it believes of
the term, and as a control without the fence after a look at its trust. A process that has lost a
lease goes on writing until the fence refuses. The rows of leases are slow or refused for a while,
and the server's clock is stepped. The server puts grants and writes of a lease into one
order, that of their commits. Afterwards everything is mended and every lease must be held; then it
is checked:

  epochs                rise with each grant; none has two holders
  trust                 no process believes in a term when a newer one is granted; a step of the
                        clock may end a lease early
  fenced writes         none after the grant of a newer term; none that was committed is lost
  takeovers             in time, wherever a worker was well that wants it
  the stop              clean, and all leases are released

Stale writes of the control are counted: they are no violations, but what the fence is for.

Exit code: 0 nothing was found, 1 violations (the workers' logs, their notes and the history are
kept), 2 wrong usage.
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parts = parser.add_subparsers(required=True, dest="part", metavar="leader | leases | work")
    leader = parts.add_parser(
        "leader",
        help="elections and maintenance",
        description="Kills, stops, freezes and cuts off workers at random, the leader above all.",
        epilog=_LEADER_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    work = parts.add_parser(
        "work",
        help="jobs",
        description="Breaks connections, the server and workers at random while jobs are worked.",
        epilog=_WORK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    leases = parts.add_parser(
        "leases",
        help="leases and what is written under them",
        description="Kills, stops, freezes and cuts off processes at random, holders above all.",
        epilog=_LEASES_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for part, workers in ((leader, 4), (leases, 6), (work, 3)):
        part.add_argument("--seconds", type=float, default=60, help="how long faults happen (60)")
        part.add_argument("--seed", type=int, help="of the plan of faults (a new one, printed)")
        part.add_argument("--workers", type=int, default=workers, help=f"processes ({workers})")
        part.add_argument("--json", action="store_true", help="print one JSON object")
    short = chaos_leader.SHORT
    leader.add_argument(
        "--default-settings",
        action="store_true",
        help=f"riverpy's own intervals; otherwise a lease of {short.leader_ttl} s, renewed each "
        f"{short.elect_interval} s, so that there are many terms",
    )
    leases.add_argument(
        "--break",
        dest="broken",
        type=Break,
        choices=list(Break),
        help="take a protection away: violations are found then",
    )
    work.add_argument("--rate", type=float, default=500, help="jobs inserted a second (500)")
    parsed = parser.parse_args(arguments)
    if parsed.seconds <= 0 or parsed.workers < 1 or getattr(parsed, "rate", 1) <= 0:
        parser.error("--seconds and --rate must be above 0, --workers 1 or more")
    return parsed


async def main() -> int:
    """Run, print, and return the exit code."""
    arguments = parse_arguments()
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", file=sys.stderr)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    run, show = _PARTS[arguments.part]
    found = await run(seed, arguments)
    print(json.dumps(found)) if arguments.json else show(found)
    return 1 if found["violations"] else 0


async def _lead(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    settings = chaos_leader.DEFAULT if arguments.default_settings else chaos_leader.SHORT
    return await chaos_leader.run_chaos(
        seed, seconds=arguments.seconds, workers=arguments.workers, settings=settings
    )


async def _work(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return await chaos_work.run_chaos(
        seed, seconds=arguments.seconds, workers=arguments.workers, rate=arguments.rate
    )


async def _lease(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return await chaos_leases.run_chaos(
        seed, seconds=arguments.seconds, workers=arguments.workers, broken=arguments.broken
    )


_PARTS = {
    "leader": (_lead, chaos_leader.show),
    "leases": (_lease, chaos_leases.show),
    "work": (_work, chaos_work.show),
}


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("stopped")
