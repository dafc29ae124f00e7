"""Completer: stores what became of attempts, by group commit.

One statement is in flight; what ends meanwhile rides the next. A result stays here until the
database has stored it or
refused it: a lost connection, a locked row, or a value that cannot be stored holds up no other
result.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import structlog

from riverpy._clock import Backoff
from riverpy._db import jobs
from riverpy._lifecycle import TestSignal
from riverpy._log import JobLines
from riverpy._work.attempt import Outcome
from riverpy._work.failure import error_entry
from riverpy.drivers.asyncpg import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    describe,
    is_data_error,
    is_refusal,
    is_statement_timeout,
)
from riverpy.events import EventKind
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from riverpy._db.connection import DedicatedConnection
    from riverpy._work.attempt import Attempt
    from riverpy._work.counters import Counters
    from riverpy.drivers.asyncpg import Connection

BATCH_MAX = 5_000
"""Results in one statement."""
BACKLOG_MAX = 10_000
"""Results that may wait, or twice the slots if that is more; then claiming waits."""
STATEMENT_SIZE_MAX = 8 * 1024 * 1024
"""Characters of outputs and errors in one statement, unless one result alone has more."""
STATEMENT_TIMEOUT = 10.0
"""Seconds for one statement."""
REFUSALS_MAX = 8
"""Rows refused one after the other, after which a batch is held as a whole, not halved further."""
HELD_RETRY_FIRST = timedelta(milliseconds=100)
HELD_RETRY_MOST = timedelta(seconds=2)
LOCK_TOLD_AFTER = 1.0
"""Seconds after the end of an attempt from which on it is said that somebody locks its row."""
LOCKED = "another transaction holds locks on the rows: see `riverpy doctor`"
RETRY_FIRST = timedelta(milliseconds=20)
RETRY_MOST = timedelta(seconds=2)
UNSTORABLE_RETRY_DELAY = 60.0
"""Seconds until a job runs again whose result the database refused."""
_DELETED = jobs.Standing(jobs.Stamp(0, 0, 0), "deleted", 0)


class Completer:
    """Stores results in the order of their end, as far as the database lets it."""

    def __init__(
        self,
        connection: DedicatedConnection,
        schema: str | None,
        *,
        slots: int,
        waits_for_locks: bool,
        stored: Callable[[list[Attempt]], None],
        counters: Counters,
    ) -> None:
        """Make it.

        Args:
            connection: lets timestamps cross raw and has a short `lock_timeout`, unless
                `waits_for_locks`.
            schema: of River's tables.
            slots: of all queues.
            waits_for_locks: the connection cannot have a `lock_timeout`, so locked rows are looked
                for each time.
            stored: called with the attempts of each statement whose results were stored.
            counters: told of results that are refused.
        """
        self._connection = connection
        self._schema = schema
        self._backlog_max = max(BACKLOG_MAX, 2 * slots)
        self._skip_locked = waits_for_locks
        self._stored, self._counters = stored, counters
        self._backlog: list[Attempt] = []
        self._storing: list[Attempt] = []
        self._held: list[Attempt] = []
        self._held_backoff = Backoff(HELD_RETRY_FIRST, HELD_RETRY_MOST)
        self._is_hold_told = False
        self._held_until = 0.0
        """When the held results are tried again; a time of the loop."""
        self._refusals = 0
        """Rows refused one after the other in this flush."""
        self._untold: set[str] = set()
        """Queues with a job that is due again, of which their clients are not told yet."""
        self._backoff = Backoff(RETRY_FIRST, RETRY_MOST)
        self._ready, self._drained, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._closing = False
        self._scope = anyio.CancelScope(shield=True)
        self._log: Any = structlog.get_logger("riverpy").bind()
        self._refused_lines = JobLines(self._log, "warning")
        self._held_lines = JobLines(self._log, "warning")
        self._unstorable_lines = JobLines(self._log, "error")
        self.flushed = TestSignal("Completer.flushed")

    @property
    def unstored(self) -> set[Attempt]:
        """Attempts that ended and whose results are not stored yet."""
        storing = (attempt for attempt in self._storing if not attempt.stored)
        return {*storing, *self._held, *self._backlog}

    def add(self, attempt: Attempt) -> None:
        """Take an attempt that ended. It neither waits nor fails."""
        self._backlog.append(attempt)
        self._ready.set()

    async def accepting(self) -> None:
        """Return when the backlog is short enough to claim more."""
        while len(self._backlog) > self._backlog_max:
            self._drained.clear()
            await self._drained.wait()

    @asynccontextmanager
    async def running(self, close_bound: Callable[[], float]) -> AsyncGenerator[None]:
        """Store results meanwhile; on leaving, store what is left, for at most `close_bound()`
        seconds."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, name="riverpy completer")
            try:
                yield
            finally:
                self._closing = True
                self._ready.set()
                with anyio.move_on_after(close_bound(), shield=True):
                    await self._ended.wait()
                self._scope.cancel()

    async def _run(self) -> None:
        try:
            with self._scope:
                while self._backlog or self._held or not self._closing:
                    await self._wait()
                    self._ready.clear()
                    await self._flush()
        finally:
            self._ended.set()

    async def _wait(self) -> None:
        """Wait for a result, or until it is time to try the held results again."""
        if not self._backlog:
            deadline = self._held_until if self._held else math.inf
            with anyio.CancelScope(deadline=deadline):
                await self._ready.wait()
        if self._held and anyio.current_time() >= self._held_until:
            self._backlog += self._held
            self._held = []

    async def _flush(self) -> None:
        batch = self._storing = self._next_batch()
        self._refusals = 0
        others_wait = bool(self._held)
        plain = [attempt for attempt in batch if attempt.is_plain]
        await self._store(plain)
        if len(plain) != len(batch):
            for part in _parts([attempt for attempt in batch if not attempt.is_plain]):
                await self._store(part)
        self._storing = []
        if self._untold:
            await self._tell()
        if not self._held:
            self._held_backoff.reset()
            self._tell_none_held()
        elif not others_wait:
            self._held_until = anyio.current_time() + self._held_backoff.next()
        if len(self._backlog) < self._backlog_max // 2:
            self._drained.set()
        self.flushed.emit()

    def _next_batch(self) -> list[Attempt]:
        """Take what is to be stored next. Answers name jobs: of two attempts at one job, as after a
        claim that a crash of the server undid, the later one waits for another statement."""
        batch, self._backlog = self._backlog[:BATCH_MAX], self._backlog[BATCH_MAX:]
        firsts: dict[int, Attempt] = {}
        for attempt in batch:
            firsts.setdefault(attempt.id, attempt)
        if len(firsts) == len(batch):
            return batch
        self._backlog[:0] = [one for one in batch if firsts[one.id] is not one]
        return list(firsts.values())

    def _tell_none_held(self) -> None:
        if self._is_hold_told and not any(attempt.is_held for attempt in self._backlog):
            self._is_hold_told = False
            self._log.info("no job results are refused any more")

    async def _tell(self) -> None:
        """Tell other clients of jobs that they can work now. Apart from the results: until these
        are on disk, their commit would hold the lock that NOTIFY takes, and it could fail to have
        it. Where it fails the next flush tries again, or a poll finds the jobs."""
        try:
            async with self._connection.use(
                "telling of jobs that are due again", STATEMENT_TIMEOUT
            ) as connection:
                await jobs.job_tell(connection, self._schema, sorted(self._untold))
        except DATABASE_ERRORS as error:
            self._log.debug("queues are not told of jobs that are due", error=describe(error))
        else:
            self._untold.clear()

    async def _store(self, attempts: list[Attempt]) -> None:
        """Store attempts that are all plain or all not. Returns when each is stored, refused for
        good, or held."""
        if not attempts:
            return
        attempts.sort(key=_by_id)  # so that two bulk statements cannot deadlock
        skip_locked = self._skip_locked
        while True:
            try:
                async with self._connection.use(
                    "storing job results", STATEMENT_TIMEOUT
                ) as connection:
                    stored = await self._send(connection, attempts, skip_locked=skip_locked)
            except Exception as error:  # results outlive even a fault of ours
                if isinstance(error, LockNotAvailableError) and not skip_locked:
                    skip_locked = True
                    continue
                if await self._dealt_with(attempts, error):
                    return
                if isinstance(error, DATABASE_ERRORS):
                    self._log.debug("job results not stored yet", error=describe(error))
                else:
                    self._log.exception("job results not stored yet")
                await anyio.sleep(self._backoff.next())
            else:
                self._backoff.reset()
                self._refusals = 0
                if stored and not stored[0].is_plain:
                    self._untold.update(one.queue for one in stored if one.is_due)
                self._stored(stored)
                return

    async def _dealt_with(self, attempts: list[Attempt], error: Exception) -> bool:
        """Find the row that keeps the others from being stored, by halves, and set it aside.
        Returns False where the same statement may succeed when it is sent again."""
        is_refused = is_refusal(error) or isinstance(error, LockNotAvailableError)
        if not is_refused and not (is_statement_timeout(error) and len(attempts) > 1):
            return False
        if len(attempts) > 1 and self._refusals < REFUSALS_MAX:
            middle = len(attempts) // 2
            await self._store(attempts[:middle])
            await self._store(attempts[middle:])
        elif len(attempts) == 1 and is_data_error(error) and not attempts[0].is_replaced:
            await self._replace(attempts[0], error)
        else:
            self._refusals += 1
            self._hold(attempts, describe(error))
        return True

    def _hold(self, attempts: list[Attempt], why: str) -> None:
        """Keep results for later that the server refuses for a reason that may pass."""
        if not all(attempt.is_held for attempt in attempts):
            self._is_hold_told = True
            self._held_lines.say(
                "job results are refused and will be tried again",
                count=len(attempts),
                job_ids=[attempt.id for attempt in attempts[:20]],
                error=why,
            )
        for attempt in attempts:
            attempt.is_held = True
        self._held += attempts

    def _hold_locked(self, attempts: list[Attempt]) -> None:
        """Keep results whose rows somebody's transaction has locked, most for a moment only. Rows
        that it locks besides are no news."""
        now = time.monotonic()
        told = any(attempt.is_held for attempt in attempts)
        late = [attempt for attempt in attempts if now - attempt.ended >= LOCK_TOLD_AFTER]
        if late and not told:
            self._hold(late, LOCKED)
            attempts = [attempt for attempt in attempts if not attempt.is_held]
        self._held += attempts

    async def _replace(self, attempt: Attempt, error: Exception) -> None:
        """Store a plain failure in place of a result that the database refuses."""
        self._unstorable_lines.say(
            "job result cannot be stored",
            job_id=attempt.id,
            kind=attempt.kind,
            error=describe(error),
        )
        attempt.drop_updates()
        attempt.is_replaced = True
        final = attempt.attempt >= attempt.max_attempts
        attempt.outcome = Outcome(
            event=EventKind.JOB_FAILED,
            state=JobState.DISCARDED if final else JobState.RETRYABLE,
            attempt=attempt.attempt,
            final=final,
            delay=UNSTORABLE_RETRY_DELAY,
            error=error_entry(
                attempt=attempt.attempt,
                seconds_ago=time.monotonic() - (attempt.started or attempt.ended),
                error="the result of this attempt could not be stored",
                trace="",
            ),
        )
        await self._store([attempt])

    async def _send(
        self, connection: Connection, attempts: list[Attempt], *, skip_locked: bool
    ) -> list[Attempt]:
        """Send the results; returns the attempts whose results are stored now."""
        if not skip_locked:
            states = await self._write(connection, attempts)
        else:
            async with connection.transaction():
                ids = [attempt.id for attempt in attempts]
                free = await jobs.job_lock_attempts(connection, self._schema, ids)
                unlocked = [attempt for attempt in attempts if attempt.id in free]
                states = await self._write(connection, unlocked) if unlocked else {}
        stored = attempts
        if len(states) != len(attempts):
            stored = await self._check(connection, attempts, states)
        now = time.monotonic()
        for attempt in stored:
            attempt.stored = now
            attempt.state_stored = states[attempt.id]
        return stored

    async def _write(self, connection: Connection, attempts: list[Attempt]) -> dict[int, str]:
        """Send one statement; returns the state of each row that took its result."""
        now = time.monotonic()
        if not attempts[0].is_plain:
            settlements = [attempt.settlement(now) for attempt in attempts]
            return await jobs.job_settle(connection, self._schema, settlements)
        ids, numbers, times = map(list, zip(*[attempt.stamp for attempt in attempts], strict=True))
        ages = [now - attempt.ended for attempt in attempts]
        done = await jobs.job_complete(
            connection, self._schema, ids=ids, attempts=numbers, attempted_ats=times, ages=ages
        )
        return dict.fromkeys(done, JobState.COMPLETED.value)

    async def _check(
        self, connection: Connection, attempts: list[Attempt], states: dict[int, str]
    ) -> list[Attempt]:
        """Find out about rows that did not take their result. Returns the attempts whose results
        are stored.

        A row that carries our own result was stored by a statement whose answer was lost; one that
        still runs with our stamp is locked by somebody's open transaction, and is tried again
        later.
        """
        missing = [attempt.id for attempt in attempts if attempt.id not in states]
        found = await jobs.job_standings(connection, self._schema, missing)
        stored: list[Attempt] = []
        locked: list[Attempt] = []
        for attempt in attempts:
            if attempt.id in states:
                stored.append(attempt)
                continue
            standing = found.get(attempt.id, _DELETED)
            if standing.state == JobState.RUNNING and standing.stamp == attempt.stamp:
                locked.append(attempt)
            elif attempt.is_stored_as(standing):
                states[attempt.id] = standing.state
                stored.append(attempt)
            else:
                self._counters.results_refused += 1
                self._refused_lines.say(
                    "job result refused: the attempt is no longer this client's",
                    job_id=attempt.id,
                    kind=attempt.kind,
                    attempt=attempt.attempt,
                    outcome=attempt.event.value,
                    state=standing.state,
                )
        self._hold_locked(locked)
        return stored


def _parts(attempts: list[Attempt]) -> Iterator[list[Attempt]]:
    """The attempts in parts whose results one statement can carry in its time."""
    part: list[Attempt] = []
    size = 0
    for attempt in attempts:
        if part and size + attempt.size > STATEMENT_SIZE_MAX:
            yield part
            part, size = [], 0
        part.append(attempt)
        size += attempt.size
    yield part


def _by_id(attempt: Attempt) -> int:
    return attempt.id
