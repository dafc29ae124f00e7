"""TermRunner: one tenure for each term that this process leads, which holds a maintainer up
from the term's begin to its end.

A tenure is one plain task, held strongly here: a task group could not let go of code that ignores
its cancellation. It has its own scope, its own maintainers and its own end, and shares nothing with
another tenure, so that nothing of an old term can reach a newer one.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio

from riverpy._clock import Backoff
from riverpy._lifecycle import ServiceGroup, StopCause, StopScope, single_error
from riverpy._log import get_logger
from riverpy._log_events import (
    MAINTENANCE_FAILED,
    MAINTENANCE_FAILED_TOO_OFTEN,
    MAINTENANCE_FAILED_WHILE_STOPPING,
    MAINTENANCE_RAN_PAST_ITS_TERM,
    RESIGNATION_FAILED,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._clock import Timer
    from riverpy._leases.validity import Term
    from riverpy._lifecycle import Service

ATTEMPTS = 3
"""How often maintenance may fail in a row before the term is given up."""
RETRY_FIRST = timedelta(seconds=1)
RETRY_MOST = timedelta(seconds=2)
STEADY = 60.0
"""Seconds after which maintenance that was up has proven itself: a later failure is a first one."""
QUARANTINE_REPORT = 10.0
"""Seconds between two warnings about maintenance that goes on after its term."""


class TermRunner:
    """Begins and ends maintenance as the terms of this process do. An elector calls `begin` and
    `end` in turn."""

    def __init__(self, make: Callable[[Term], Service], *, grace: float, timer: Timer) -> None:
        """Make it; nothing runs.

        Args:
            make: makes a fresh maintainer for a term, once for each attempt to start it.
            grace: seconds that maintenance may take to end.
            timer: what is waited by.
        """
        self.resign: Callable[[Term], bool] = _resigns_nothing
        """Called once when the maintenance of a term has failed too often. Returns whether the term
        was resigned; False: it had ended before."""
        self.is_up: Callable[[Term], None] = _ignore
        """Called each time that the maintenance of a term is up."""
        self._make, self._grace, self._timer = make, grace, timer
        self._last_term: Term | None = None
        self._current: _Tenure | None = None
        self._tenures: set[_Tenure] = set()  # the loop holds tasks weakly
        self._clear = asyncio.Event()
        self._clear.set()

    @property
    def is_clear(self) -> bool:
        """Whether nothing of any term runs."""
        return self._clear.is_set()

    async def wait_clear(self) -> None:
        """Return when nothing of any term runs."""
        await self._clear.wait()

    def begin(self, term: Term) -> None:
        """Start maintenance for a term, and return at once. The same term begins once only; what an
        earlier one left is stopped."""
        if term == self._last_term:
            return
        self._last_term = term
        if self._current is not None:
            self._current.stop(StopCause.LEADERSHIP_LOST)
            self._current.quarantine()
        self._current = _Tenure(self, term, self._make, self._timer)
        self._tenures.add(self._current)
        self._clear.clear()
        self._current.start()

    async def end(self, cause: StopCause) -> bool:
        """Stop maintenance, and wait for at most the grace until it has ended.

        Returns:
            Whether nothing of any term runs. What did not end is in quarantine: it is reported
            until it ends, and `wait_clear` waits for it.
        """
        tenure = self._current
        if tenure is not None:
            tenure.stop(cause)
            if not await self._timer.wait(tenure.ended, self._grace):
                tenure.quarantine()
            if self._current is tenure:
                self._current = None
        return self.is_clear

    async def close(self, bound: float) -> bool:
        """End everything that runs, also what is in quarantine, for the client stops; wait for at
        most `bound` seconds. Returns whether nothing runs."""
        for tenure in self._tenures:
            tenure.stop(StopCause.CLIENT_STOP)
        return await self._timer.wait(self._clear, bound)

    def tenure_ended(self, tenure: _Tenure) -> None:
        """A tenure tells its end."""
        self._tenures.discard(tenure)
        if not self._tenures:
            self._clear.set()


class _Tenure:
    """The maintenance of one term. Once stopped it starts nothing and tells nobody anything."""

    def __init__(
        self,
        leader: TermRunner,
        term: Term,
        make: Callable[[Term], Service],
        timer: Timer,
    ) -> None:
        self.ended = asyncio.Event()
        self._leader, self._term, self._make, self._timer = leader, term, make, timer
        self._scope = StopScope()
        self._quarantined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._up_since: float | None = None
        self._failures = 0
        self._backoff = Backoff(RETRY_FIRST, RETRY_MOST)
        self._log = get_logger(leader_id=term.leader_id, elected_at=term.elected_at.isoformat())

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name="riverpy maintenance leader"
        )

    def stop(self, cause: StopCause) -> None:
        self._scope.stop(cause)

    def quarantine(self) -> None:
        """Report until the end that it goes on: its grace is over."""
        self._quarantined.set()

    @property
    def _is_stopped(self) -> bool:
        return self._scope.cause is not None

    async def _run(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._report)
                with self._scope:
                    await self._serve()
                tasks.cancel_scope.cancel()
        finally:
            self.ended.set()
            self._leader.tenure_ended(self)

    async def _serve(self) -> None:
        """Hold a maintainer up, until stopped or until that failed too often in a row."""
        while not self._is_stopped and self._failures < ATTEMPTS:
            self._up_since = None
            try:
                await self._hold()
            except Exception as error:
                await self._failed(_inner(error))

    async def _hold(self) -> None:
        """Run a fresh maintainer until stopped, or until it fails."""
        async with ServiceGroup(self._scope) as group:
            await group.start(self._make(self._term))
            self._up_since = self._timer.boottime()
            if not self._is_stopped:
                self._leader.is_up(self._term)
            await anyio.sleep_forever()

    async def _failed(self, error: BaseException) -> None:
        """Say it, and wait before the next attempt or give the term up."""
        if self._is_stopped:
            self._log.error(MAINTENANCE_FAILED_WHILE_STOPPING, **_account(error))
            return
        if self._was_steady():
            self._failures = 0
            self._backoff.reset()
        self._failures += 1
        if self._failures == ATTEMPTS:
            self._give_up(error)
            return
        delay = self._backoff.next()
        say = self._say_of(error)
        say(
            MAINTENANCE_FAILED,
            attempt=self._failures,
            attempts=ATTEMPTS,
            seconds=round(delay, 1),
            **_account(error),
        )
        await self._timer.sleep(delay)

    def _say_of(self, error: BaseException) -> Callable[..., None]:
        """As loudly as its kind deserves: a fault of ours, an outage, or what is no failure, for
        the elector ends the term."""
        if isinstance(error, FencedOutError):
            return self._log.info
        return self._log.warning if isinstance(error, DATABASE_ERRORS) else self._log.error

    def _was_steady(self) -> bool:
        since = self._up_since
        return since is not None and self._timer.boottime() - since >= STEADY

    def _give_up(self, error: BaseException) -> None:
        try:
            is_resigned = self._leader.resign(self._term)
        except Exception:
            self._log.exception(RESIGNATION_FAILED)
            return
        say = self._say_of(error)
        say(
            MAINTENANCE_FAILED_TOO_OFTEN,
            effect="this client resigns" if is_resigned else "none: its term had ended",
            attempt=ATTEMPTS,
            attempts=ATTEMPTS,
            **_account(error),
        )

    async def _report(self) -> None:
        await self._quarantined.wait()
        since = self._timer.boottime()
        while True:
            self._log.warning(
                MAINTENANCE_RAN_PAST_ITS_TERM,
                effect="its fenced transactions fail, and this client does not become leader "
                "until it ends",
                seconds=round(self._timer.boottime() - since),
            )
            await self._timer.sleep(QUARANTINE_REPORT)


def _inner(error: Exception) -> BaseException:
    """The error of the service that failed first, if it was one alone."""
    if isinstance(error, BaseExceptionGroup):
        return single_error(cast("BaseExceptionGroup[BaseException]", error))
    return error


def _account(error: BaseException) -> dict[str, Any]:
    """What a log line says of an error: a fault with its traceback, an outage without."""
    account: dict[str, Any] = {"error": describe(error)}
    if not isinstance(error, (*DATABASE_ERRORS, FencedOutError)):
        account["exc_info"] = error
    return account


def _ignore(term: Term) -> None:
    pass


def _resigns_nothing(term: Term) -> bool:
    return False
