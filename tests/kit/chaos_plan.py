"""The plan of faults for a fleet that works jobs. A seed always has the same plan."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import NamedTuple

from riverpy._log_events import WORKER_STOPPED
from tests.kit.proxy import Partition
from tests.kit.server_faults import INSERTS_NAME, POOL_NAME

LONG_RUN = 600.0
"""Runs of at least this many seconds have outages of two minutes."""
LONG_OUTAGE = 120.0
LONG_SHARE = 0.2
"""The share of long outages among the outages of the server."""
CALM_SHARE = 0.3
"""The share of faults that start only after `CALM` seconds without other faults."""
CALM = 2.0


class FaultKind(StrEnum):
    """A kind of fault."""

    KILL_LISTENER = "backend of the listener killed"
    KILL_RESERVED = "backend of lease and heartbeat killed"
    KILL_CLAIMS = "backend of the claims killed"
    KILL_RESULTS = "backend of the results killed"
    KILL_MAINTENANCE = "backend of the maintenance killed"
    KILL_POOL = "backends of the pool killed"
    KILL_INSERTS = "backend of the shared inserts killed"
    FREEZE_LISTENER = "backend of the listener frozen"
    FREEZE_RESERVED = "backend of lease and heartbeat frozen"
    FREEZE_CLAIMS = "backend of the claims frozen"
    FREEZE_RESULTS = "backend of the results frozen"
    FREEZE_POOL = "backends of the pool frozen"
    FREEZE_INSERTS = "backend of the shared inserts frozen"
    CUT = "connections cut"
    REQUESTS_LOST = "partition, requests lost"
    ANSWERS_LOST = "partition, answers lost"
    HELD = "partition, held"
    PROXY_REFUSES = "connections refused on the way"
    RESTART = "server restarted"
    CRASH = "server crashed"
    DOWN = "server down"
    REFUSE = "connections refused by the server"
    EXHAUST = "connections exhausted"
    TIMEOUTS = "timeouts set by the administrator"
    ROLE_TIMEOUTS = "timeouts set for a role"
    READ_ONLY = "server read-only"
    LOCK_ROWS = "job rows locked"
    HOARD_POOL = "pool filled by user code"
    SLOW_ROWS = "job rows slow"
    REFUSED_ROWS = "job rows refused"
    CLOCK_STEP = "server clock stepped"
    KILL = "worker killed"
    STOP = WORKER_STOPPED
    FREEZE = "worker frozen"
    KILL_PARENT = "worker with a job in a process killed"
    STOP_BLOCKED = "worker with a blocked event loop stopped"


BACKENDS = {
    "LISTENER": "riverpy listener",
    "RESERVED": "riverpy reserved",
    "CLAIMS": "riverpy claims",
    "RESULTS": "riverpy results",
    "MAINTENANCE": "riverpy maintenance",
    "POOL": POOL_NAME,
    "INSERTS": INSERTS_NAME,
}
PARTITIONS = {
    FaultKind.REQUESTS_LOST: Partition.REQUESTS_LOST,
    FaultKind.ANSWERS_LOST: Partition.ANSWERS_LOST,
    FaultKind.HELD: Partition.HELD,
}
OF_SERVER = {
    FaultKind.RESTART,
    FaultKind.CRASH,
    FaultKind.DOWN,
    FaultKind.REFUSE,
    FaultKind.EXHAUST,
    FaultKind.TIMEOUTS,
    FaultKind.READ_ONLY,
    FaultKind.CLOCK_STEP,
}
"""Faults of the server. Only one of them happens at a time."""
OF_USERS = {
    FaultKind.LOCK_ROWS,
    FaultKind.HOARD_POOL,
    FaultKind.SLOW_ROWS,
    FaultKind.REFUSED_ROWS,
}
ENDS_WORKER = {
    FaultKind.KILL,
    FaultKind.STOP,
    FaultKind.KILL_PARENT,
    FaultKind.STOP_BLOCKED,
}
NO_REASON = {FaultKind.SLOW_ROWS, FaultKind.REFUSED_ROWS, FaultKind.CLOCK_STEP}
"""Faults that are no reason to rescue a job."""
HARMLESS = {FaultKind.TIMEOUTS, *OF_USERS, FaultKind.CLOCK_STEP}
"""Faults during which the fleet keeps working."""


class Fault(NamedTuple):
    """A fault of the plan."""

    at: float
    """Seconds since the start."""
    kind: FaultKind
    number: int
    """Number of the worker that it hits."""
    seconds: float
    """Duration in seconds."""


def make_plan(seed: int, *, seconds: float, workers: int, dead_after: float) -> list[Fault]:
    """Return the faults of a seed, always the same. Each kind comes once a round. Most faults start
    while others last, some after all others ended."""
    rng = random.Random(seed)
    plan: list[Fault] = []
    kinds: list[FaultKind] = []
    at = until = 1.0
    while at < seconds:
        if not kinds:
            kinds = rng.sample(list(FaultKind), len(FaultKind))
        kind = kinds.pop()
        duration = _duration(kind, rng, dead_after)
        if kind is FaultKind.DOWN and seconds >= LONG_RUN and rng.random() < LONG_SHARE:
            duration = LONG_OUTAGE
        plan.append(Fault(at, kind, rng.randrange(workers), duration))
        until = max(until, at + duration)
        at += rng.uniform(0.3, 3.7)
        if rng.random() < CALM_SHARE:
            at = max(at, until + CALM)
    return plan


def _duration(kind: FaultKind, rng: random.Random, dead_after: float) -> float:
    """Return a duration. Silent faults are interesting near the time after which a client counts as
    dead."""
    if kind in PARTITIONS or kind.name.startswith("FREEZE"):
        return rng.uniform(0.1, 1.7) * dead_after
    if kind in {*ENDS_WORKER, FaultKind.RESTART, FaultKind.CRASH}:
        return rng.uniform(0.0, 2.0)
    if kind is FaultKind.SLOW_ROWS:  # one row takes longer than the statement timeout
        return rng.uniform(3.0, 12.0)
    return rng.uniform(1.0, 5.0)
