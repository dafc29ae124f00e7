"""The history of a fleet as its tables record it, and the check for violations.

All times are by the server's clock. The workers run on the same machine and read the same clock, so
an act has the time at which it was done, however late its row was stored.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import asyncpg

STATEMENTS = read_statements(Path(__file__).with_name("history.sql"))


CLOCK_STEP_SEEN = timedelta(minutes=1)
"""If the first act in a term is later than its election by more than this, the server's clock was
set back."""


class Term(NamedTuple):
    """A term of a leader. A newer term was elected later."""

    elected_at: datetime
    leader_id: str

    def __str__(self) -> str:
        return f"term of {self.leader_id} since {self.elected_at:%H:%M:%S.%f}"


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """An act or an observation of one process."""

    process: str
    what: str
    """`begin` and `end` of a term as the client reports them, `pass` of a service, `attempt` at a
    job, or `stall`: the process was frozen or did not run from `stalled_since` to `at`."""
    at: datetime
    term: Term | None = None
    stalled_since: datetime | None = None
    job_id: int | None = None
    attempt: int | None = None


class TermWrite(msgspec.Struct, frozen=True):
    """A row that a term wrote through its fence."""

    term: Term
    number: int
    committed_at: datetime


class Slot(msgspec.Struct, frozen=True):
    """A periodic job that was inserted."""

    periodic_id: str
    scheduled_at: datetime
    created_at: datetime


class JobEnd(msgspec.Struct, frozen=True):
    """State of a job at the end of the run."""

    id: int
    state: str
    attempt: int
    rescues: int
    errors: int
    unstorable: int = 0
    """Number of errors that say that the result of an attempt could not be stored."""


class Crash(NamedTuple):
    """A time in which the server recovered from an immediate shutdown. River's table of leaders is
    unlogged and then empty, so another client can win the election while the lease of the old
    leader is still valid."""

    began: datetime
    ended: datetime


class ClockStep(NamedTuple):
    """A time in which the server's clock was set back. Leases may expire early in it."""

    began: datetime
    ended: datetime


class Broken(NamedTuple):
    """A time in which a worker was broken, or the server, which has no name."""

    what: str
    began: datetime
    ended: datetime


class Span(NamedTuple):
    """A term in true times, from its election to the last act in it."""

    term: Term
    process: str
    began: datetime
    ended: datetime


class Violation(msgspec.Struct, frozen=True):
    """A broken rule."""

    rule: str
    text: str


class History(msgspec.Struct, kw_only=True):
    """All records of a run."""

    acts: list[Act] = msgspec.field(default_factory=list)
    writes: list[TermWrite] = msgspec.field(default_factory=list)
    slots: list[Slot] = msgspec.field(default_factory=list)
    jobs: list[JobEnd] = msgspec.field(default_factory=list)
    inserted: list[int] = msgspec.field(default_factory=list)
    """The ids of the jobs whose insert returned a result."""
    crashes: list[Crash] = msgspec.field(default_factory=list)
    clock_steps: list[ClockStep] = msgspec.field(default_factory=list)
    broken: list[Broken] | None = None
    """Times that can explain a rescue; None: they are not known."""
    validity: timedelta = timedelta(seconds=15)
    """The longest time for which a leader's lease is valid without an answer of the server."""

    def election_times(self) -> dict[Term, datetime]:
        """Return the true time of the election of each term. While the server's clock is set back,
        the time in the term is too early, and the first act or write in the term counts."""
        first: dict[Term, datetime] = {}
        acts = [(act.term, act.at) for act in self.acts if act.term is not None]
        for term, at in (*acts, *((write.term, write.committed_at) for write in self.writes)):
            first[term] = min(at, first.get(term, at))
        return {
            term: at if at - term.elected_at > CLOCK_STEP_SEEN else term.elected_at
            for term, at in first.items()
        }

    def spans(self) -> list[Span]:
        """Return the terms in the order of their election.

        A term ends when its process reports the end. A killed process does not report it, and a
        frozen one reports it late; for these the last act counts.
        """
        stalls = defaultdict[str, list[tuple[datetime, datetime]]](list)
        of_term = defaultdict[Term, list[Act]](list)
        for act in self.acts:
            if act.stalled_since is not None:
                stalls[act.process].append((act.stalled_since, act.at))
            if act.term is not None:
                of_term[act.term].append(act)
        spans: list[Span] = []
        elected_at = self.election_times()
        for term, acts in sorted(of_term.items(), key=lambda item: (elected_at[item[0]], item[0])):
            process = acts[0].process
            acted = [act.at for act in acts if act.what != "end"]
            ended = [act.at for act in acts if act.what == "end"]
            was_stalled = any(
                since <= max(ended, default=until) and until >= elected_at[term]
                for since, until in stalls[process]
            )
            known = acted if was_stalled and acted else acted + ended
            first = min(act.at for act in acts)
            # After a clock step the time of the election is not the true one.
            began = first if self.clock_steps else min(term.elected_at, first)
            spans.append(Span(term, process, began, max(known)))
        return spans

    def gaps(self) -> list[float]:
        """Return the seconds without a leader between terms."""
        return [
            max((after.began - before.ended).total_seconds(), 0.0)
            for before, after in pairwise(self.spans())
        ]


def check(history: History) -> list[Violation]:
    """Return the violations of a history; empty if there are none."""
    return [
        *_check_terms(history),
        *_check_writes(history),
        *_check_slots(history),
        *_check_jobs(history),
    ]


def _check_terms(history: History) -> Iterator[Violation]:
    for before, after in pairwise(history.spans()):
        if before.ended <= after.began:
            continue
        allowed = any(
            before.began <= hit.ended
            and hit.began <= after.began
            and before.ended <= hit.ended + history.validity
            for hit in (*history.crashes, *history.clock_steps)
        )
        if not allowed:
            yield Violation(
                "no overlap of terms",
                f"{before.process} acted in the {before.term} until {before.ended:%H:%M:%S.%f}, "
                f"after {after.process} was elected: {after.term}",
            )
    processes = defaultdict[Term, set[str]](set)
    for act in history.acts:
        if act.term is not None:
            processes[act.term].add(act.process)
    for term, names in processes.items():
        if len(names) > 1:
            yield Violation(
                "one process per term", f"{', '.join(sorted(names))} acted in the {term}"
            )


def _check_writes(history: History) -> Iterator[Violation]:
    elected_at = history.election_times()

    def order(term: Term) -> tuple[datetime, Term]:
        return elected_at[term], term

    begins = sorted((act.at, act.term) for act in history.acts if act.what == "begin" and act.term)
    newest: Term | None = None
    for write in sorted(history.writes, key=lambda write: (write.committed_at, order(write.term))):
        while begins and begins[0][0] < write.committed_at:
            newest = max(newest or begins[0][1], begins.pop(0)[1], key=order)
        if newest is not None and order(write.term) < order(newest):
            yield Violation(
                "no write of an older term after one of a newer",
                f"write {write.number} of the {write.term} was committed at "
                f"{write.committed_at:%H:%M:%S.%f}, after the beginning of the {newest}",
            )
        newest = max(newest or write.term, write.term, key=order)


# --- periodic slots

POLICIES = ("skip", "one", "all")
"""What the fleet's periodic jobs do about missed slots. Each job is named after its policy."""
PERIOD = timedelta(seconds=1)
"""Period of each of them."""


def _check_slots(history: History) -> Iterator[Violation]:
    by_id = defaultdict[str, list[Slot]](list)
    for slot in history.slots:
        by_id[slot.periodic_id].append(slot)
    for periodic_id, found in by_id.items():
        found.sort(key=lambda slot: (slot.scheduled_at, slot.created_at))
        for before, after in pairwise(found):
            if fault := _fault_between(before, after):
                yield Violation(
                    "every slot follows its policy",
                    f"{periodic_id}: {fault}: {_line(before)}, then {_line(after)}",
                )
        for slot in found:
            if fault := _fault_of(slot, history):
                yield Violation(
                    "every slot follows its policy", f"{periodic_id}: {fault}: {_line(slot)}"
                )


def _fault_between(before: Slot, after: Slot) -> str | None:
    step = after.scheduled_at - before.scheduled_at
    if not step:
        return "twice"
    if step % PERIOD:
        return "beside its times"
    if before.periodic_id == "all":
        return "slots are missing" if step > PERIOD else None
    return "more than one was caught up" if after.created_at == before.created_at else None


def _fault_of(slot: Slot, history: History) -> str | None:
    """Return why a slot is wrong. Only `all` inserts slots older than the newest, except for the
    time between the leader's read and its insert. If the clock is set back in that time, the insert
    has an earlier time than the slot."""
    lateness = _lateness(slot)
    if lateness < timedelta(0):
        steps = history.clock_steps
        is_stepped = any(one.began - PERIOD <= slot.scheduled_at <= one.ended for one in steps)
        return None if is_stepped else "early"
    is_late = slot.periodic_id != "all" and lateness > PERIOD + history.validity
    return "late" if is_late else None


def _lateness(slot: Slot) -> timedelta:
    return slot.created_at - slot.scheduled_at


def _line(slot: Slot) -> str:
    return f"{slot.scheduled_at:%H:%M:%S.%f} inserted at {slot.created_at:%H:%M:%S.%f}"


# --- jobs

LOST_CLAIMS_WINDOW = timedelta(seconds=1)
"""How long before a crash of the server a lost claim may be, since claims are not durable. These
attempts start once more."""
RECENT = timedelta(seconds=5)
"""How long a fault that ended may still keep a worker from its work."""


def _check_jobs(history: History) -> Iterator[Violation]:
    begun = Counter((act.job_id, act.attempt) for act in history.acts if act.what == "attempt")
    attempts = Counter(job_id for job_id, _ in begun)
    claims_lost = Counter(
        (act.job_id, act.attempt)
        for act in history.acts
        if act.what == "attempt"
        and any(
            crash.began - LOST_CLAIMS_WINDOW <= act.at <= crash.ended for crash in history.crashes
        )
    )
    for job in history.jobs:
        if job.state != "completed":
            yield Violation("every job completed", f"{job}")
        elif job.errors != job.rescues + job.unstorable or job.attempt != 1 + job.errors:
            yield Violation("one attempt plus one per rescue", f"{job}")
        elif not 1 <= attempts[job.id] <= job.attempt:
            yield Violation("no job without an attempt", f"{attempts[job.id]} started of {job}")
    for (job_id, attempt), count in begun.items():
        if count > 1 + claims_lost[job_id, attempt]:
            yield Violation(
                "no attempt starts twice", f"job {job_id} attempt {attempt}: {count} times"
            )
    yield from _check_rescues(history)
    for job_id in sorted(set(history.inserted) - {job.id for job in history.jobs}):
        yield Violation("no job lost", f"job {job_id}")


def _check_rescues(history: History) -> Iterator[Violation]:
    """Check that an attempt is repeated only after a fault of its worker. A clock step and rows
    that are refused are no reason."""
    if history.broken is None:
        return
    rescued = {job.id for job in history.jobs if job.rescues and not job.unstorable}
    by_job = defaultdict[int, list[Act]](list)
    for act in history.acts:
        if act.what == "attempt" and act.job_id in rescued:
            by_job[act.job_id].append(act)
    for job_id, attempts in by_job.items():
        for before, after in pairwise(sorted(attempts, key=lambda act: act.at)):
            if not _was_hit(history, before, after.at):
                yield Violation("a rescue has a reason", f"job {job_id}: {before}, then {after}")


def _was_hit(history: History, attempt: Act, until: datetime) -> bool:
    name = attempt.process.partition(":")[0]
    return any(
        broken.what in {"", name} and broken.began <= until and broken.ended >= attempt.at - RECENT
        for broken in history.broken or ()
    ) or any(
        act.stalled_since is not None
        and act.process == attempt.process
        and act.at >= attempt.at
        and act.stalled_since <= until
        for act in history.acts
    )


# --- reading


async def read(connection: asyncpg.Connection) -> History:
    """Read the tables. The caller adds crashes and inserted ids."""

    async def rows(name: str) -> list[Mapping[str, Any]]:
        return await connection.fetch(STATEMENTS[name])

    return History(
        acts=[_act(row) for row in await rows("acts")],
        writes=[
            TermWrite(_term(row), row["number"], row["committed_at"])
            for row in await rows("term_writes")
        ],
        slots=[Slot(**row) for row in await rows("slots")],
        jobs=[JobEnd(**row) for row in await rows("jobs")],
    )


def _term(row: Mapping[str, Any]) -> Term:
    return Term(row["elected_at"], row["leader_id"])


def _act(row: Mapping[str, Any]) -> Act:
    return Act(
        process=row["process"],
        what=row["what"],
        at=row["at"],
        term=None if row["leader_id"] is None else _term(row),
        stalled_since=row["stalled_since"],
        job_id=row["job_id"],
        attempt=row["attempt"],
    )
