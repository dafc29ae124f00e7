"""Injects random faults into a fleet of workers, and checks that it broke no rule."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

from scripts import chaos_leader, chaos_leases, chaos_steps, chaos_work
from tests.kit.lease_chaos import DisabledProtection

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN_MAX = 40
"""Maximum number of violations that are printed."""
_LEADER_EPILOG = """
Each worker is `riverpy worker` with a fault proxy of its own in front of a PostgreSQL of its own.
The leader's maintenance has one more service, which writes rows through the fence of the term.
Clients insert jobs, and three periodic jobs are due every second. The server restarts and crashes,
its clock is stepped, and job rows are slow or refused. Workers record their acts without the proxy.
After the last fault everything must work again. Then these rules are checked:

  no overlap of terms            by the acts of the processes. Exceptions: after a crash of the
                                 server, which empties its table of leaders, and after a step of
                                 its clock, which ends leases early, terms may overlap for as long
                                 as a lease is valid
  no write of an older term      committed after the start or a write of a newer term
  every slot follows its policy  none twice, none early; `all` has each slot, `one` and `skip` the
                                 newest
  every job completed            one attempt plus one per rescue, none lost, no attempt twice
  a rescue has a reason          a fault that hit the worker; a clock step or a bad row is none

Exit code: 0 no violation, 1 violations (the workers' logs and the history are kept), 2 wrong usage.
"""


_WORK_EPILOG = """
Jobs of many kinds are inserted in every way: one at a time, in batches, by COPY, and in
transactions of which some roll back. Each worker is `riverpy worker` with a role and a fault proxy
of its own in front of a PostgreSQL of its own. Backends of each connection are killed and frozen,
and networks are cut. The server restarts, crashes, stays down, refuses connections, is full, is
read-only, has short timeouts, and its clock is stepped. Users lock rows, fill pools, and create
triggers that make rows slow or refuse them. Workers are killed, stopped and frozen, also with jobs
in processes and with a blocked event loop. Handlers write their acts to files. After the last fault
every job must finish. Then these rules are checked:

  jobs        no committed job is lost, no job of a rolled back transaction exists, unique jobs
              exist once, cancelled jobs end
  results     one per claim, one that finishes the job, and a stored result stays
  attempts    each except the last has an error; each error, rescue and repetition has a reason.
              A crash of the server explains lost claims of its last second, which are not durable.
              A step of its clock and a bad row explain no rescue
  children    they end with their worker, and no attempt runs beside the next
  recovery    no worker restarts by itself; each stores results within 5 s of the end of a fault
              that hit it, and no due job waits longer
  logs        one line per outage and one per recovery, no traceback, no flood of lines

Exit code: 0 no violation, 1 violations (the workers' logs, their acts and the history are kept),
2 wrong usage.
"""


_LEASES_EPILOG = """
Each worker is `riverpy worker` with a fault proxy of its own in front of a PostgreSQL of its own.
All try to acquire the same leases, some directly and some for singletons. Half of them take part in
the leader election of one domain, half in that of another. The holder of a lease writes through its
fence, even if the lease is no longer valid locally, and as a control without the fence after a
check of the lease. A process that lost a lease continues to write until the fence refuses. Rows of
leases are slow or refused for a while, and the server's clock is stepped. The server records grants
and writes of a lease in the order of their commits. After the last fault every lease must be held.
Then these rules are checked:

  epochs                rise with each grant; none has two holders
  validity              no lease is valid in a process when a newer term is granted; a step of the
                        clock may end a lease early
  fenced writes         none after the grant of a newer term; no committed one is lost
  takeovers             in time, while a worker that tries to acquire the lease is undisturbed
  the stop              clean, and all leases are released

Stale writes of the control are counted. They are no violations, but show what the fence prevents.

Exit code: 0 no violation, 1 violations (the workers' logs, their notes and the history are kept),
2 wrong usage.
"""


_STEPS_EPILOG = """
Each worker is `riverpy worker` in front of a PostgreSQL of its own. Jobs of ten steps run, and the
results of two of the steps are kept. The steps may end one after the other, so that kills hit all
of them, also at the moment in which a result is stored. Then these rules are checked:

  results    a step whose result is stored does not run again, and all attempts get the same result
  recovery   all jobs run again within 60 s of each kill, and complete after the last one

Exit code: 0 no violation, 1 violations (the workers' logs and records are kept), 2 wrong usage.
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parts = parser.add_subparsers(
        required=True, dest="part", metavar="leader | leases | steps | work"
    )
    leader = parts.add_parser(
        "leader",
        help="elections and maintenance",
        description="Kills, stops, freezes and cuts off workers at random, mostly the leader.",
        epilog=_LEADER_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    work = parts.add_parser(
        "work",
        help="work on jobs",
        description="Injects faults into connections, server and workers while jobs are worked.",
        epilog=_WORK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    leases = parts.add_parser(
        "leases",
        help="leases and the writes under them",
        description="Kills, stops, freezes and cuts off processes at random, mostly holders.",
        epilog=_LEASES_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = parts.add_parser(
        "steps",
        help="steps of long jobs",
        description="Kills workers by SIGTERM and SIGKILL and restarts the server.",
        epilog=_STEPS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for part, workers in ((leader, 4), (leases, 6), (steps, 2), (work, 3)):
        _add_common_arguments(part, workers)
        if part is not steps:
            part.add_argument("--seconds", type=float, default=60, help="time of faults (60)")
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
        type=DisabledProtection,
        choices=list(DisabledProtection),
        help="switch a protection off, so that violations are found",
    )
    steps.add_argument("--kills", type=int, default=50, help="number of kills (50)")
    steps.add_argument("--jobs", type=int, default=1, help="number of jobs (1)")
    work.add_argument("--rate", type=float, default=500, help="jobs inserted per second (500)")
    parsed = parser.parse_args(arguments)
    _check_arguments(parser, vars(parsed))
    return parsed


def _add_common_arguments(part: argparse.ArgumentParser, workers: int) -> None:
    part.add_argument(
        "--seed", type=int, help="seed of the plan of faults (default: a new one, printed)"
    )
    part.add_argument("--workers", type=int, default=workers, help=f"processes ({workers})")
    part.add_argument("--json", action="store_true", help="print one JSON object")


def _check_arguments(parser: argparse.ArgumentParser, values: dict[str, Any]) -> None:
    if values.get("seconds", 1) <= 0 or values.get("rate", 1) <= 0:
        parser.error("--seconds and --rate must be above 0")
    if min(values.get(name, 1) for name in ("workers", "kills", "jobs")) < 1:
        parser.error("--workers, --kills and --jobs must be 1 or more")


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
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)
        show_violations(found)
    return 1 if found["violations"] else 0


def show_violations(found: dict[str, Any]) -> None:
    """Print the first violations, their number, and the place of the logs."""
    for violation in found["violations"][:SHOWN_MAX]:
        print(f"VIOLATION {violation['rule']}: {violation['text']}")
    count = len(found["violations"])
    logs = f", the logs are in {found['logs']}" if found["logs"] else ""
    print(f"{count} violations{logs}" if count else "no violation")


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


async def _step(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return await chaos_steps.run_chaos(
        seed, kills=arguments.kills, workers=arguments.workers, jobs=arguments.jobs
    )


_PARTS = {
    "leader": (_lead, chaos_leader.show),
    "leases": (_lease, chaos_leases.show),
    "steps": (_step, chaos_steps.show),
    "work": (_work, chaos_work.show),
}


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("stopped")
