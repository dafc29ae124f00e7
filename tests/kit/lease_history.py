"""What the holders of leases did, as tables and their own notes tell, and what of it must not be.

The order of commits is the server's (`tests/kit/lease_history.sql`). Times are of the one clock of
the machine that all run on.
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
AFTERMATH_MOST = 3.0
"""Seconds after a fault for which it may keep somebody from taking a lease, at most. A bound may be
longer, but then a fault of long before is no reason."""


class Grant(msgspec.Struct, frozen=True):
    """A term, as it was given."""

    lease: str
    place: int
    """In the order of all commits that concern the lease."""
    epoch: int
    holder: str
    granted_at: float
    free_since: float | None
    """When the lease was free, or its first term had never been."""


class Write(msgspec.Struct, frozen=True):
    """A row that was committed under a term."""

    lease: str
    is_fenced: bool
    place: int
    """In the order of commits; of the fenced ones, that of the grants."""
    epoch: int
    process: str
    number: int
    """Of the process."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """What a process noted, when it was so at that time."""

    at: float
    what: str
    """`up`: it is on its feet; `held`: it believes to hold the term; `wrote`: its write was
    committed; `refused`: the fence let it not write."""
    process: str
    lease: str = ""
    epoch: int = 0
    number: int = 0

    @property
    def worker(self) -> str:
        """Whose process that is."""
        return self.process.partition(":")[0]


class Span(NamedTuple):
    """A time in which something was broken."""

    what: str
    """The name of a worker; empty: the server."""
    began: float
    ended: float
    is_restart: bool = False
    """Whether the worker was started at the end of it."""


class ClockStep(NamedTuple):
    """A time in which the server's clock was set back, by `CLOCK_STEP`."""

    began: float
    ended: float


class LeaseHistory(msgspec.Struct, kw_only=True):
    """All that is known of a run."""

    grants: list[Grant] = msgspec.field(default_factory=list)
    writes: list[Write] = msgspec.field(default_factory=list)
    notes: list[Note] = msgspec.field(default_factory=list)
    broken: list[Span] = msgspec.field(default_factory=list)
    workers: list[str] = msgspec.field(default_factory=list)
    candidates: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """The workers that want a lease, where it is not all of them."""
    clock_steps: list[ClockStep] = msgspec.field(default_factory=list)
    trust: float = 0.0
    """Seconds for which a holder believes in its term without an answer of the server, at most."""
    calm_since: float = 0.0
    """From then on nothing was broken."""
    bound: float = 0.0
    """Seconds within which a lease that is free is taken, where a worker is well."""

    def true_time(self, server_time: float) -> float:
        """What a time by the server's clock was in truth."""
        true = server_time + CLOCK_STEP
        is_stepped = any(step.began <= true <= step.ended for step in self.clock_steps)
        return true if is_stepped else server_time

    def ended_early(self, granted: float, until: float) -> bool:
        """Whether the term before a grant may have ended early, by a step of the clock, so that
        its holder believed in it until then."""
        return any(
            step.began <= granted and until <= step.ended + self.trust for step in self.clock_steps
        )

    def _is_measured(self, grant: Grant) -> bool:
        """Whether its times tell for how long the lease was free: there was a term before it, and
        no step of the clock."""
        if grant.free_since is None:
            return False
        since, until = self.true_time(grant.free_since), self.true_time(grant.granted_at)
        return not any(
            step.began <= until and since <= step.ended + self.trust for step in self.clock_steps
        )

    def takeovers(self) -> list[tuple[Grant, float]]:
        """The terms that followed another of their lease, and for how many seconds it was free."""
        return [
            (grant, max(grant.granted_at - _free_since(grant), 0.0))
            for grant in self.grants
            if self._is_measured(grant)
        ]

    def stale_writes(self, *, is_fenced: bool) -> list[Write]:
        """Those that came after one of a newer term, or of the grant of one if they are fenced."""
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
    """What of a history must not be; empty if all is well."""
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
                yield Violation("one holder an epoch", f"{term}: {', '.join(sorted(names))}")


def _check_trust(history: LeaseHistory) -> Iterator[Violation]:
    held: dict[tuple[str, int], Note] = {}
    """The last moment of each term in which its process believed in it."""
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
                "no trust in a term beside a newer one",
                f"{last.process} believed in it {last.at - granted:.3f} s after {after}",
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
                "a free lease is taken in time",
                f"after {seconds:.3f} s, which should have been {limit:.3f} s at most: {grant}",
            )


def _outage(history: LeaseHistory, grant: Grant) -> float:
    """Seconds for which the server was away while the lease was free, or just before."""
    since = _just_before(history, grant)
    return sum(
        max(min(span.ended, grant.granted_at) - max(span.began, since), 0.0)
        for span in history.broken
        if not span.what
    )


def _well(history: LeaseHistory, grant: Grant) -> set[str]:
    """The workers that nothing was done to while they should have taken the lease, nor just before,
    and that were on their feet."""
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
    return _free_since(grant) - min(history.bound, AFTERMATH_MOST)


def _free_since(grant: Grant) -> float:
    assert grant.free_since is not None
    return grant.free_since


# --- reading


async def read(connection: asyncpg.Connection) -> LeaseHistory:
    """What the tables tell. The rest is the caller's to add."""
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
    """What the processes noted, each in a file; a last line that a kill cut off is left out."""
    decoder = msgspec.json.Decoder(Note)
    return [
        decoder.decode(line)
        for path in paths
        if path.exists()
        for line in path.read_bytes().split(b"\n")
        if line.endswith(b"]")
    ]
