"""The history of leases and their holders, from tables and records of processes, and the check for
violations.

The order of commits is the server's (`tests/kit/lease_history.sql`). All times are by the one clock
of the machine.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tests.kit.history import Violation
from tests.kit.statements import read_statements
from tests.kit.stepped_server import CLOCK_STEP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import asyncpg

STATEMENTS = read_statements(Path(__file__).with_name("lease_history.sql"))
AFTERMATH_MAX = 3.0
"""The longest time in seconds after a fault for which it can explain that a lease stays free. The
limit for a free lease may be longer, but an older fault is no reason."""


class Grant(msgspec.Struct, frozen=True):
    """A term as the server granted it."""

    lease: str
    place: int
    """Position in the order of all commits that concern the lease."""
    epoch: int
    holder: str
    granted_at: float
    free_since: float | None
    """When the lease became free, or None for its first term."""


class Write(msgspec.Struct, frozen=True):
    """A row that was committed under a term."""

    lease: str
    is_fenced: bool
    place: int
    """Position in the order of commits; of a fenced write, in the order of the grants."""
    epoch: int
    process: str
    number: int
    """Number given by the process."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A record of a process that was true at that time."""

    at: float
    what: str
    """`up`: it runs. `held`: its lease is valid locally. `wrote`: its write was committed.
    `refused`: the fence refused its write."""
    process: str
    lease: str = ""
    epoch: int = 0
    number: int = 0

    @property
    def worker(self) -> str:
        """The name of the worker that the process belongs to."""
        return self.process.partition(":")[0]


class Span(NamedTuple):
    """A time in which something was broken."""

    what: str
    """The name of a worker; empty for the server."""
    began: float
    ended: float
    is_restart: bool = False
    """Whether the worker was started again at its end."""


class ClockStep(NamedTuple):
    """A time in which the server's clock was set back by `CLOCK_STEP`."""

    began: float
    ended: float


class LeaseHistory(msgspec.Struct, kw_only=True):
    """All records of a run."""

    grants: list[Grant] = msgspec.field(default_factory=list)
    writes: list[Write] = msgspec.field(default_factory=list)
    notes: list[Note] = msgspec.field(default_factory=list)
    broken: list[Span] = msgspec.field(default_factory=list)
    workers: list[str] = msgspec.field(default_factory=list)
    candidates: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """The workers that try to acquire a lease, where not all do."""
    clock_steps: list[ClockStep] = msgspec.field(default_factory=list)
    validity: float = 0.0
    """The longest time in seconds for which a lease is valid locally without an answer of the
    server."""
    calm_since: float = 0.0
    """The time after which nothing was broken."""
    bound: float = 0.0
    """Seconds within which a free lease must be acquired while a worker runs undisturbed."""

    def true_time(self, server_time: float) -> float:
        """Convert a time of the server's clock to the true time."""
        true = server_time + CLOCK_STEP
        is_stepped = any(step.began <= true <= step.ended for step in self.clock_steps)
        return true if is_stepped else server_time

    def ended_early(self, granted: float, until: float) -> bool:
        """Return whether a clock step may have ended the term before a grant early, so that its
        holder still had a locally valid lease at `until`."""
        return any(
            step.began <= granted and until <= step.ended + self.validity
            for step in self.clock_steps
        )

    def _is_measured(self, grant: Grant) -> bool:
        """Return whether the times of a grant show for how long the lease was free: it has a term
        before it, and no clock step."""
        if grant.free_since is None:
            return False
        since, until = self.true_time(grant.free_since), self.true_time(grant.granted_at)
        return not any(
            step.began <= until and since <= step.ended + self.validity for step in self.clock_steps
        )

    def takeovers(self) -> list[tuple[Grant, float]]:
        """Return the terms that followed another term of their lease, with the seconds for which it
        was free."""
        return [
            (grant, max(grant.granted_at - _free_since(grant), 0.0))
            for grant in self.grants
            if self._is_measured(grant)
        ]

    def stale_writes(self, *, is_fenced: bool) -> list[Write]:
        """Return the writes that came after a write of a newer term. For fenced writes, the grant
        of a newer term counts too."""
        stale: list[Write] = []
        writes = [write for write in self.writes if write.is_fenced == is_fenced]
        grants = self.grants if is_fenced else []
        by_lease = groupby(sorted([*writes, *grants], key=_place), lambda step: step.lease)
        for _, steps in by_lease:
            newest = 0
            for step in steps:
                if isinstance(step, Write) and step.epoch < newest:
                    stale.append(step)
                newest = max(newest, step.epoch)
        return stale


def check(history: LeaseHistory) -> list[Violation]:
    """Return the violations of a history; empty if there are none."""
    return [
        *_check_grants(history),
        *_check_trust(history),
        *_check_writes(history),
        *_check_takeovers(history),
    ]


def _place(step: Grant | Write) -> tuple[str, int]:
    return step.lease, step.place


def _check_grants(history: LeaseHistory) -> Iterator[Violation]:
    in_order = sorted(history.grants, key=_place)
    for before, after in pairwise(in_order):
        if before.lease == after.lease and before.epoch >= after.epoch:
            yield Violation("epochs rise", f"{before}, then {after}")
    holders = defaultdict[tuple[str, int], set[str]](set)
    for grant in in_order:
        holders[grant.lease, grant.epoch].add(grant.holder)
    processes = defaultdict[tuple[str, int], set[str]](set)
    for note in history.notes:
        if note.what != "up":
            processes[note.lease, note.epoch].add(note.process)
    for found in (holders, processes):
        for term, names in found.items():
            if len(names) > 1:
                yield Violation("one process per epoch", f"{term}: {', '.join(sorted(names))}")


def _check_trust(history: LeaseHistory) -> Iterator[Violation]:
    held: dict[tuple[str, int], Note] = {}
    """The last moment of each term at which its lease was valid locally."""
    for note in history.notes:
        if note.what == "held":
            term = note.lease, note.epoch
            held[term] = max(held.get(term, note), note, key=lambda found: found.at)
    for before, after in pairwise(sorted(history.grants, key=_place)):
        last = held.get((before.lease, before.epoch))
        granted = history.true_time(after.granted_at)
        if before.lease != after.lease or last is None or last.at <= granted:
            continue
        if not history.ended_early(granted, last.at):
            yield Violation(
                "no lease is valid beside a newer term",
                f"its lease was valid in {last.process} {last.at - granted:.3f} s after {after}",
            )


def _check_writes(history: LeaseHistory) -> Iterator[Violation]:
    for write in history.stale_writes(is_fenced=True):
        yield Violation("no fenced write after the grant of a newer term", str(write))
    granted = {(grant.lease, grant.epoch) for grant in history.grants}
    for write in history.writes:
        if (write.lease, write.epoch) not in granted:
            yield Violation("no write without a term", str(write))
    stored = {(write.process, write.number) for write in history.writes}
    for note in history.notes:
        if note.what == "wrote" and (note.process, note.number) not in stored:
            yield Violation("no write lost", str(note))


def _check_takeovers(history: LeaseHistory) -> Iterator[Violation]:
    for grant, seconds in history.takeovers():
        limit = history.bound + _outage(history, grant)
        if seconds > limit and _well(history, grant):
            yield Violation(
                "a free lease is acquired in time",
                f"after {seconds:.3f} s, not within {limit:.3f} s: {grant}",
            )


def _outage(history: LeaseHistory, grant: Grant) -> float:
    """Return the seconds for which the server was away while the lease was free, or just before."""
    since = _just_before(history, grant)
    return sum(
        max(min(span.ended, grant.granted_at) - max(span.began, since), 0.0)
        for span in history.broken
        if not span.what
    )


def _well(history: LeaseHistory, grant: Grant) -> set[str]:
    """Return the running workers that no fault hit while they should have acquired the lease, or
    just before."""
    since, until = _just_before(history, grant), _free_since(grant) + history.bound
    hit = {
        span.what for span in history.broken if span.began < until and _end(history, span) > since
    }
    return set(history.candidates.get(grant.lease, history.workers)) - hit


def _end(history: LeaseHistory, span: Span) -> float:
    if not span.is_restart:
        return span.ended
    ups = (note for note in history.notes if note.what == "up" and note.worker == span.what)
    return min((note.at for note in ups if note.at > span.ended), default=float("inf"))


def _just_before(history: LeaseHistory, grant: Grant) -> float:
    return _free_since(grant) - min(history.bound, AFTERMATH_MAX)


def _free_since(grant: Grant) -> float:
    assert grant.free_since is not None
    return grant.free_since


# --- reading


async def read(connection: asyncpg.Connection) -> LeaseHistory:
    """Read the tables. The caller adds the rest."""
    released = {
        (row["lease"], row["epoch"]): row["at"].timestamp()
        for row in await connection.fetch(STATEMENTS["releases"])
    }
    grants: list[Grant] = []
    for row in await connection.fetch(STATEMENTS["grants"]):
        lease, place, epoch, holder, granted_at, free_since = row
        before = grants[-1] if grants and grants[-1].lease == lease else None
        since = None if free_since is None else free_since.timestamp()
        if before is not None and since is None:
            since = released[lease, before.epoch]
        grants.append(Grant(lease, place, epoch, holder, granted_at.timestamp(), since))
    writes = [Write(*row) for row in await connection.fetch(STATEMENTS["writes"])]
    return LeaseHistory(grants=grants, writes=writes)


def read_notes(paths: Iterable[Path]) -> list[Note]:
    """Read the records in the files of the processes. A last line that a kill cut off is left
    out."""
    decoder = msgspec.json.Decoder(Note)
    return [
        decoder.decode(line)
        for path in paths
        if path.exists()
        for line in path.read_bytes().split(b"\n")
        if line.endswith(b"]")
    ]
