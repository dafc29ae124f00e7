"""The history of jobs in a fleet under random faults, and the check for violations.

All times are seconds since 1970 by the one clock of the machine. A claim is identified by its
`attempted_at` in microseconds since 2000.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._log_events import (
    CLAIM_LEFT_UNANSWERED,
    CONNECTION_LOST,
    CONNECTION_RESTORED,
    JOB_CANCELLED_AFTER_ITS_ATTEMPT,
    JOB_FAILED,
    JOB_RESULT_REFUSED,
    JOB_RESULT_REPLACED,
    JOB_RESULTS_LEFT_UNSTORED,
    JOBS_ABANDONED,
    JOBS_FAILED,
    JOBS_WORKED,
    WORK_RAN_PAST_ITS_LEASE,
)
from riverpy._postgres.job_maintenance import RESCUE_ERROR_TEXT
from tests.kit.chaos_jobs import PLANNED
from tests.kit.chaos_plan import FaultKind
from tests.kit.history import Violation
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STATEMENTS = read_statements(Path(__file__).with_name("work_history.sql"))
LOST_CLAIMS_WINDOW = 1.0
"""Seconds before a crash of the server within which claims may be lost, since they are not
durable."""
UNSTORABLE_ERROR = "the result of this attempt could not be stored"
CANCEL_ERROR = "JobCancelError: job cancelled remotely"
ENDED = {"completed", "cancelled"}
FINAL = {"job_completed": "completed", "job_cancelled": "cancelled"}
"""The events that finish a job, each with the final state of the job."""
AGAIN = {"JobSnooze", "CancelledError"}
"""The ends of an attempt that do not count: a snooze, or an interruption by a stop."""
CUT = {"processed", "blocking"}
"""The kinds that record no end when their worker is killed."""
CHILD_END_MAX = 1.0
"""Maximum seconds that a child process may live after the end of its worker, on a busy machine."""
EPOCH = 946684800
"""Seconds from 1970 to 2000."""
DUE_AT_ONCE = {"quick", "once", "child"}
"""The kinds that wait for nothing but a free slot."""
STALL_MIN = 0.5
"""Shorter times without a completed job, in seconds, need no explanation."""
ALL = ""
"""The name that stands for every worker."""


class Act(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An act of one process of a worker, or of a child process."""

    process: str
    """The worker's name and process id; of a child process, those of its worker."""
    what: str
    """`begin` and `end` of an attempt's handler, `stored` when the client reports a result, `child`
    for a job that a handler inserted, `stall` for a time that the process did not run, `alive`
    while a child process runs a job."""
    at: float
    job_id: int = 0
    attempt: int = 0
    claim: int = 0
    kind: str = ""
    number: int = 0
    how: str = ""
    """How an attempt ended: `returned`, or the type of the exception. Of `stored`: the kind of the
    event."""
    child_id: int = 0
    since: float = 0.0
    monotonic: float = 0.0
    """When a child process was alive, by the monotonic clock of the machine."""

    @property
    def worker(self) -> str:
        """The name of the worker that the process belongs to."""
        return self.process.partition(":")[0]


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job at the end of the run."""

    id: int
    number: int
    kind: str
    state: str
    attempt: int
    claim: int | None = None
    claimants: list[str] = []
    failed: list[int] = []
    """The attempts of its errors."""
    errors: list[str] = []
    failed_at: list[float] = []
    created: float = 0.0
    failures: int | None = None
    """How often it was planned to fail."""


class Span(msgspec.Struct, frozen=True):
    """A time in which something was broken."""

    kind: str
    worker: str
    """The name of the worker, or `ALL`."""
    began: float
    ended: float
    halts: bool = True
    """Whether the workers that it hits cannot work during it."""
    is_reason: bool = True
    """Whether it explains rescues of jobs of living workers."""
    ends_worker: bool = False


class ClockStep(NamedTuple):
    """A time in which the server's clock was wrong."""

    began: float
    ended: float
    seconds: float
    """How far the clock was ahead, in seconds."""


class Cancel(NamedTuple):
    """A call of `job_cancel` that returned."""

    job_id: int
    answered: float


class LogLine(msgspec.Struct, frozen=True):
    """A line that a worker logged."""

    event: str
    level: str
    at: float
    client_id: str = ""
    exception: str = ""
    job_id: int | None = None
    """The job that the line is about, if any."""


class Recovery(NamedTuple):
    """The time without a stored result of a worker after the end of a fault that hit it."""

    kind: str
    worker: str
    began: float
    ended: float
    seconds: float
    spans: int


class History(msgspec.Struct, kw_only=True):
    """All records of a run."""

    jobs: list[JobEnd] = []
    acts: list[Act] = []
    committed: set[int] = set()
    """The numbers of jobs whose insert or commit returned."""
    rolled_back: set[int] = set()
    """The numbers of jobs whose transaction was rolled back."""
    unique: list[int] = []
    """The number of each insert that returned a new unique job."""
    cancels: list[Cancel] = []
    spans: list[Span] = []
    crashes: list[tuple[float, float]] = []
    """Start and end of each crash of the server."""
    clock_steps: list[ClockStep] = []
    ends: dict[str, float] = {}
    """When the processes of workers had ended, by the monotonic clock of the machine."""
    logs: dict[str, list[LogLine]] = {}
    """Log lines by worker."""
    began: float = 0.0
    ended: float = 0.0
    """When the faults and the load had ended."""
    dead_after: float = 60.0
    outages_max: int = 1
    """How often a worker may log in one fault that its connections are lost."""
    bound: float = 5.0
    """Seconds after the end of a fault within which jobs must run again."""

    def true_times(self, server_time: float) -> list[float]:
        """Return the possible true times of a time by the server's clock."""
        return [
            *(
                true
                for step in self.clock_steps
                if step.began <= (true := server_time - step.seconds) <= step.ended
            ),
            server_time,
        ]

    @property
    def workers(self) -> list[str]:
        """The names of all workers."""
        return sorted(self.logs)

    def recoveries(self) -> list[Recovery]:
        """Return the recovery of each worker after each fault. Faults that started before it worked
        again count as one."""
        stored = defaultdict[str, list[float]](list)
        for act in self.acts:
            if act.what == "stored":
                stored[act.worker].append(act.at)
        return [
            recovery
            for worker in self.workers
            for recovery in self._recoveries_of(worker, sorted(stored[worker]))
        ]

    def _recoveries_of(self, worker: str, stored: list[float]) -> Iterator[Recovery]:
        mine = sorted(
            (span for span in self.spans if span.worker in {ALL, worker}), key=lambda s: s.began
        )
        while mine:
            trouble, end = [mine.pop(0)], 0.0
            while True:
                end = max(span.ended for span in trouble)
                index = bisect_right(stored, end)
                first = stored[index] if index < len(stored) else self.ended
                if not mine or mine[0].began > first:
                    break
                trouble.append(mine.pop(0))
            kinds = {span.kind for span in trouble}
            yield Recovery(
                kind=kinds.pop() if len(kinds) == 1 else "several at once",
                worker=worker,
                began=trouble[0].began,
                ended=end,
                seconds=max(first - end, 0.0),
                spans=len(trouble),
            )

    def halts(self) -> list[tuple[float, float]]:
        """Return the times in which no worker could work."""
        spans = [span for span in self.spans if span.halts]
        times = sorted({time for span in spans for time in (span.began, span.ended)})
        halted: list[tuple[float, float]] = []
        for began, ended in pairwise(times):
            hit = {span.worker for span in spans if span.began <= began and ended <= span.ended}
            if ALL not in hit and (not self.logs or not hit.issuperset(self.workers)):
                continue
            if halted and halted[-1][1] == began:
                began = halted.pop()[0]
            halted.append((began, ended))
        return halted

    def stalls(self) -> list[tuple[float, float]]:
        """Return the times without a completed job although jobs were due and a worker could run
        them."""
        done = sorted(act.at for act in self.acts if act.how == "job_completed")
        begun: dict[int, float] = {}
        for act in self.acts:
            if act.what == "begin":
                begun[act.job_id] = min(act.at, begun.get(act.job_id, act.at))
        due = [
            (job.created, begun[job.id])
            for job in self.jobs
            if job.kind in DUE_AT_ONCE and not job.errors and job.id in begun
        ]
        halts = self.halts()
        found: list[tuple[float, float]] = []
        for before, after in pairwise([*done, self.ended] if done else []):
            if after - before < STALL_MIN:
                continue
            waiting = [created for created, first in due if created < after and first > before]
            since = max([before, *(end for start, end in halts if start < after)])
            since = max(since, min(waiting, default=after))
            if after - since >= STALL_MIN:
                found.append((since, after))
        return found


def check(history: History) -> list[Violation]:
    """Return the violations of a history; empty if there are none."""
    by_job = defaultdict[int, list[Act]](list)
    for act in sorted(history.acts, key=lambda act: act.at):
        if act.job_id:
            by_job[act.job_id].append(act)
    return [
        *_check_existence(history, by_job),
        *(
            violation
            for job in history.jobs
            for violation in _check_job(history, job, by_job.get(job.id, []))
        ),
        *_check_unique(history),
        *_check_cancels(history, by_job),
        *_check_children(history, by_job),
        *_check_going_on(history),
        *_check_logs(history),
    ]


# --- jobs


def _check_existence(history: History, by_job: dict[int, list[Act]]) -> Iterator[Violation]:
    numbers = {job.number for job in history.jobs if job.kind != "child"}
    ids = {job.id for job in history.jobs}
    for number in sorted(history.committed - numbers):
        yield Violation("no committed job lost", f"job number {number}")
    for act in history.acts:
        if act.what == "child" and act.child_id not in ids:
            yield Violation("no committed job lost", f"job {act.child_id}, inserted by a job")
    for number in sorted(history.rolled_back & numbers):
        yield Violation("nothing of a rolled back transaction", f"job number {number} exists")
    for job_id in sorted(by_job.keys() - ids):
        act = by_job[job_id][0]
        yield Violation("nothing of a rolled back transaction", f"job {job_id} ran: {act}")


def _check_job(history: History, job: JobEnd, acts: list[Act]) -> Iterator[Violation]:
    if job.state not in ENDED:
        yield Violation("every job ends", f"{job}")
        return
    yield from _check_results(job, acts)
    yield from _check_errors(history, job, acts)
    yield from _check_attempts(history, job, acts)


def _check_results(job: JobEnd, acts: list[Act]) -> Iterator[Violation]:
    """Check that a reported result stays, and that each claim has one result and each job one final
    one."""
    stored = [act for act in acts if act.what == "stored"]
    for claim, count in Counter(act.claim for act in stored).items():
        if count > 1:
            yield Violation("one result per claim", f"{count} of claim {claim} of {job}")
    finals = [act for act in stored if act.how in FINAL]
    if len(finals) > 1:
        yield Violation("no job finished twice", f"{job}: {finals}")
    for act in stored:
        is_kept = (
            FINAL[act.how] == job.state
            if act.how in FINAL
            else act.how != "job_failed" or act.attempt in job.failed
        )
        if not is_kept:
            yield Violation("a stored result stays", f"{job}: {act}")
    if job.state == "completed" and not any(
        act.what == "end" and act.how == "returned" and act.claim == job.claim for act in acts
    ):
        yield Violation("the handler of a completed job returned", f"{job}")


def _check_errors(history: History, job: JobEnd, acts: list[Act]) -> Iterator[Violation]:
    """Check that each attempt except the last has one error, and each error a reason."""
    expected = list(range(1, job.attempt))
    is_last_told = job.state == "cancelled" and job.failed == [*expected, job.attempt]
    if job.failed != expected and not is_last_told:
        yield Violation("one error per attempt except the last", f"{job}")
    planned = sum(PLANNED in text for text in job.errors)
    is_unplanned = job.failures is not None and planned > job.failures
    if is_unplanned or (job.state == "completed" and planned < (job.failures or 0)):
        yield Violation("a job fails as planned", f"{job}")
    for attempt, text, at in zip(job.failed, job.errors, job.failed_at, strict=True):
        if text == RESCUE_ERROR_TEXT:
            times = history.true_times(at)
            if not any(_is_rescue_explained(history, acts, attempt, true) for true in times):
                yield Violation("a rescue has a reason", f"attempt {attempt} of {job}")
        elif text == UNSTORABLE_ERROR:
            if not any(span.kind == FaultKind.REFUSED_ROWS for span in history.spans):
                yield Violation("an error has a reason", f"{text!r} of {job}")
        elif text != CANCEL_ERROR and PLANNED not in text:
            yield Violation("an error has a reason", f"{text!r} of {job}")


def _is_rescue_explained(history: History, acts: list[Act], attempt: int, at: float) -> bool:
    """Return whether a fault shortly before hit the worker of the attempt, or any worker if it did
    not start. An attempt that was snoozed has the same number as the one rescued after it."""
    ended = {act.claim for act in acts if act.what == "stored"}
    workers = {
        act.worker
        for act in acts
        if act.what == "begin" and act.attempt == attempt and act.claim not in ended
    }
    since = at - 3 * history.dead_after
    return any(
        span.is_reason
        and span.began <= at
        and span.ended >= since
        and (not workers or span.worker in {ALL, *workers})
        for span in history.spans
    ) or any(
        act.what == "stall" and since <= act.at and act.since <= at and act.worker in workers
        for act in history.acts
    )


def _check_attempts(history: History, job: JobEnd, acts: list[Act]) -> Iterator[Violation]:
    """Check that each claim starts once. The same attempt may start again after a snooze, an
    interruption, or a crash of the server that lost the claim."""
    begins = [act for act in acts if act.what == "begin"]
    for claim, count in Counter(act.claim for act in begins).items():
        if count > 1:
            yield Violation("a claim starts once", f"claim {claim} of {job}: {count} times")
    ends = {act.claim: act.how for act in acts if act.what == "end"}
    stored = {act.claim for act in acts if act.what == "stored" and act.how != "job_interrupted"}
    for attempt, group in groupby(
        sorted(begins, key=lambda act: (act.attempt, act.at)), key=lambda act: act.attempt
    ):
        for begin, later in pairwise(group):
            is_forgotten = any(
                since - LOST_CLAIMS_WINDOW <= begin.at <= until for since, until in history.crashes
            )
            how = ends.get(begin.claim)
            is_cut = begin.claim not in stored and _was_cut(history, begin, how, later.at)
            if how not in AGAIN and not is_forgotten and not is_cut:
                yield Violation(
                    "an attempt starts again for a reason",
                    f"attempt {attempt} of {job}, which began at {begin.at}",
                )


def _was_cut(history: History, begin: Act, how: str | None, until: float) -> bool:
    """Return whether the end of its worker cut an attempt off. A worker whose event loop is blocked
    stores no result and cancels nothing: it releases all its jobs as it exits."""
    if _was_ended(history, begin, until, FaultKind.STOP_BLOCKED):
        return True
    return how is None and begin.kind in CUT and _was_ended(history, begin, until)


def _was_ended(history: History, begin: Act, until: float, fault: FaultKind | None = None) -> bool:
    """Return whether the worker of an attempt was ended after its start, by this fault if one is
    given."""
    return any(
        span.ends_worker
        and fault in {None, span.kind}
        and span.worker == begin.worker
        and span.began <= until
        and span.ended >= begin.at
        for span in history.spans
    )


def _check_unique(history: History) -> Iterator[Violation]:
    rows = Counter(job.number for job in history.jobs if job.kind == "once")
    for number, count in rows.items():
        if count > 1:
            yield Violation("a unique job exists once", f"{count} jobs number {number}")
    for number, count in Counter(history.unique).items():
        if count > 1:
            yield Violation("a unique job is inserted once", f"number {number}: {count} times")


def _check_cancels(history: History, by_job: dict[int, list[Act]]) -> Iterator[Violation]:
    states = {job.id: job for job in history.jobs}
    for cancel in history.cancels:
        job = states.get(cancel.job_id)
        if job is None:
            continue
        if job.kind == "endless" and job.state != "cancelled":
            yield Violation("a cancelled job ends", f"{job}")
        asked = cancel.answered
        for act in by_job.get(job.id, []):
            if act.what == "begin" and min(_claim_times(history, act)) > asked:
                yield Violation("a cancelled job does not run again", f"{job}: {act}")


def _claim_times(history: History, act: Act) -> list[float]:
    """Return the possible true times of an attempt's claim, which are not after the act."""
    claimed = act.claim / 1e6 + EPOCH
    return [true for true in history.true_times(claimed) if true <= act.at] or [act.at]


def _check_children(history: History, by_job: dict[int, list[Act]]) -> Iterator[Violation]:
    """Check that a child process ends with its worker, and that no attempt runs beside the next
    one."""
    for acts in by_job.values():
        alive = defaultdict[int, list[Act]](list)
        for act in acts:
            if act.what == "alive":
                alive[act.claim].append(act)
        for attempt in alive.values():
            last = attempt[-1]
            ended = history.ends.get(last.process)
            if ended is not None and last.monotonic > ended + CHILD_END_MAX:
                late = last.monotonic - ended
                yield Violation("a child ends with its worker", f"{late:.1f} s late: {last}")
        for before, after in pairwise(sorted(alive.values(), key=lambda acts: acts[0].monotonic)):
            if before[-1].monotonic > after[0].monotonic and not _may_be_taken(
                history, before[0], after[0].at
            ):
                yield Violation("no attempt runs beside the next", f"{before[-1]}, then {after[0]}")


def _may_be_taken(history: History, begin: Act, until: float) -> bool:
    """Return whether another client may have claimed the job although the worker lives: the worker
    could not reach the database or did not run, or the server lost the claim."""
    return any(
        span.is_reason
        and not span.ends_worker
        and span.worker in {ALL, begin.worker}
        and span.began <= until
        and span.ended >= begin.at
        for span in history.spans
    ) or any(
        act.what == "stall" and act.process == begin.process and begin.at <= act.at <= until
        for act in history.acts
    )


# --- going on


def _check_going_on(history: History) -> Iterator[Violation]:
    for recovery in history.recoveries():
        if recovery.seconds > history.bound:
            yield Violation("jobs run soon after a fault", f"{recovery}")
    for since, until in history.stalls():
        if until - since > history.bound:
            yield Violation(
                "no stall", f"no job completed for {until - since:.1f} s, from {since} to {until}"
            )


# --- logs

LOST, RESTORED = CONNECTION_LOST, CONNECTION_RESTORED
LINES_MAX = 12
"""Maximum number of log lines of one worker about one fault, besides one for each job that they
name."""
EARLY = 0.1
"""Seconds by which a line may be earlier than the recorded start of its fault."""
PER_JOB = {
    JOB_FAILED,
    JOB_RESULT_REFUSED,
    JOB_CANCELLED_AFTER_ITS_ATTEMPT,
    JOBS_WORKED,
    JOBS_FAILED,
}
"""Events about jobs or of each minute, not about faults."""
EXPECTED_ERRORS = {
    CLAIM_LEFT_UNANSWERED,
    JOB_RESULTS_LEFT_UNSTORED,
    JOB_RESULT_REPLACED,
    JOBS_ABANDONED,
    WORK_RAN_PAST_ITS_LEASE,
}
"""Errors that a worker may log when it stops or loses its term during an outage, or when its rows
are refused."""


def _check_logs(history: History) -> Iterator[Violation]:
    recoveries = history.recoveries()
    for worker, lines in history.logs.items():
        for line in lines:
            is_error = line.level in {"error", "critical"} and line.event not in EXPECTED_ERRORS
            if line.exception or is_error:
                yield Violation("no unexpected log lines", f"{worker}: {line}")
        yield from _check_pairs(worker, lines)
        mine = [recovery for recovery in recoveries if recovery.worker == worker]
        for recovery, about in _by_trouble(mine, lines):
            named = {(line.event, line.job_id) for line in about if line.job_id is not None}
            if len(about) - len(named) > LINES_MAX * recovery.spans:
                yield Violation("no storm of log lines", f"{len(about)} lines about {recovery}")
            lost = sum(line.event == LOST for line in about)
            if lost > history.outages_max * recovery.spans:
                yield Violation("one log line per outage", f"{lost} lines about {recovery}")
        if not mine and any(line.event == LOST for line in lines):
            yield Violation("one log line per outage", f"{worker} logs one without a fault")


def _by_trouble(
    troubles: list[Recovery], lines: Iterable[LogLine]
) -> Iterator[tuple[Recovery, list[LogLine]]]:
    """Return the log lines of each fault: those between its start and the start of the next."""
    begins = [trouble.began - EARLY for trouble in troubles]
    about = defaultdict[int, list[LogLine]](list)
    for line in lines:
        if line.event not in PER_JOB:
            about[bisect_right(begins, line.at) - 1].append(line)
    for index, trouble in enumerate(troubles):
        yield trouble, about[index]


def _check_pairs(worker: str, lines: list[LogLine]) -> Iterator[Violation]:
    """Check that each process logs losses and recoveries in turns."""
    last: dict[str, str] = {}
    for line in lines:
        if line.event not in {LOST, RESTORED}:
            continue
        if last.get(line.client_id, RESTORED) == line.event:
            yield Violation("one log line per outage", f"{worker}: again {line}")
        last[line.client_id] = line.event
    newest = next((line.client_id for line in reversed(lines) if line.client_id), "")
    if last.get(newest) == LOST:  # other connections may have ended during an outage
        yield Violation("one log line per recovery", f"{worker}: no line for the last outage")
