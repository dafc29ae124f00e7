"""Reindexer: rebuilds River's indexes while they are used, and drops what rebuilds leave that did
not finish."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    CONFIGURED_INDEXES_NOT_FOUND,
    INDEX_ARTIFACT_DROP_FAILED,
    INDEX_ARTIFACT_DROPPED,
    INDEX_ARTIFACTS_LEFT_BEHIND,
    INDEX_CLEANUP_FAILED,
    INDEX_REBUILD_FAILED,
    INDEX_REBUILD_TIMED_OUT,
    INDEX_REBUILT,
    INDEXES_OF_ANOTHER_OWNER_SKIPPED,
    REINDEXING_DISABLED,
    REINDEXING_POSTPONED,
)
from riverpy._maintenance.base import MaintenanceService
from riverpy._postgres.driver import (
    CONNECT_TIMEOUT,
    DATABASE_ERRORS,
    PostgresError,
    close,
    describe,
    is_statement_timeout,
)
from riverpy._postgres.indexes import (
    index_artifacts,
    index_comment,
    index_drop,
    index_limits,
    index_list,
    index_lock,
    index_now,
    index_rebuild,
)
from riverpy.schedules import next_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import TermContext
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.indexes import Index
    from riverpy.schedules import PeriodicSchedule

INDEX_NAMES_DEFAULT = (
    "river_job_args_index",
    "river_job_kind",
    "river_job_metadata_index",
    "river_job_pkey",
    "river_job_prioritized_fetching_index",
    "river_job_state_and_finalized_at_index",
    "river_job_unique_idx",
)
"""River's list: the indexes of its table of jobs."""
STATEMENT_LIMIT = timedelta(seconds=5)
LOCK_LIMIT = timedelta(seconds=1)
IDLE_LIMIT = timedelta(seconds=30)
"""The limits of the session but during a rebuild. A session whose process was frozen, or cannot be
reached, ends by the last one, and its lock with it."""
ANSWER_MARGIN = 5.0
"""Seconds by which an answer may be later than the server's limit; then the session is cut."""
CLEAN_UP_LIMIT = 15.0
"""Seconds that a stop may take to drop what it interrupted."""
DROP_AGAIN = 0.1
"""Seconds between two attempts at that."""
HELD_AGAIN = 5.0
"""Seconds until the next look at a lock that another reindexer holds: after its process was killed
the server takes a moment to notice."""
LOOK_AGAIN = 3600.0
"""Seconds between two looks at the server's clock, at most."""
POSTPONED_DAYS = (1, 2, 4)
"""How long an index rests that timed out once, twice in a row, and more often."""


class Midnight:
    """Daily at midnight, UTC."""

    def next(self, after: datetime, /) -> datetime:
        """The midnight that follows."""
        day = after.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return day + timedelta(days=1)


_POSTPONED = re.compile(
    r"\n?riverpy: (\d{1,6}) rebuilds timed out, next after (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)Z\Z"
)


class Postponement(NamedTuple):
    """Why an index rests. It stands in the index's comment: every leader reads it there, and so
    does an operator."""

    timeouts: int
    """In a row."""
    until: datetime

    @classmethod
    def read(cls, comment: str) -> Postponement | None:
        """What the comment says."""
        found = _POSTPONED.search(comment)
        if found is None:
            return None
        try:
            return cls(int(found[1]), datetime.fromisoformat(found[2]).replace(tzinfo=UTC))
        except ValueError:  # somebody wrote over it
            return None

    @classmethod
    def after(cls, comment: str, begin: datetime) -> Postponement:
        """One timeout more than the comment says, in a run that was due at `begin`."""
        before = cls.read(comment)
        timeouts = 1 if before is None else before.timeouts + 1
        days = POSTPONED_DAYS[min(timeouts, len(POSTPONED_DAYS)) - 1]
        return cls(timeouts, begin + timedelta(days=days))

    def written(self, comment: str) -> str:
        """The comment with this at its end."""
        until = self.until.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat()
        said = f"riverpy: {self.timeouts} rebuilds timed out, next after {until}Z"
        return "\n".join(filter(None, (without_postponement(comment), said)))


def without_postponement(comment: str) -> str:
    """What else the comment says."""
    return _POSTPONED.sub("", comment)


class Reindexer(MaintenanceService):
    """Rebuilds the indexes when its schedule says so. Its session is made for a run and ends with
    it."""

    name = "reindexer"

    def __init__(
        self,
        context: TermContext,
        names: Sequence[str],
        connect: Callable[[], Awaitable[Connection]],
    ) -> None:
        """Make it.

        Args:
            context: what the term's services share.
            names: the indexes.
            connect: makes a session that leads past any pooler in transaction mode.
        """
        super().__init__(context)
        config = context.config
        self._names = tuple(dict.fromkeys(names))
        self._connect = connect
        self._schedule: PeriodicSchedule = config.reindexer_schedule or Midnight()
        self._timeout = config.reindexer_timeout
        self._due: datetime | None = None
        self._run_at: datetime
        """When the run was due. From then rests what times out in it: a day's rest is over when the
        next daily run begins."""
        self._pending: list[str] = []
        self._has_begun = self._is_clean = False
        self._lock_failures = RepeatedFailureLog(self.log)
        self._missing: list[str] = []

    async def run_once(self, scope: StopScope) -> float:
        """Rebuild what is due. The first pass of a term only drops what an earlier one left."""
        now = await self._now()
        if not self._has_begun:
            self._has_begun, self._run_at, self._due = True, now, next_time(self._schedule, now)
        elif self._due is not None and now >= self._due:  # what was missed is not caught up
            self._run_at = max(self._due, now - timedelta(seconds=LOOK_AGAIN))
            self._pending, self._due = list(self._names), next_time(self._schedule, now)
        if self._pending or not self._is_clean:
            if not await self._work(scope):
                return HELD_AGAIN
            now = await self._now()
        if self._due is None:
            return LOOK_AGAIN
        return min(max((self._due - now).total_seconds(), 0.0), LOOK_AGAIN)

    async def _work(self, scope: StopScope) -> bool:
        """Drop what was left, rebuild what is pending. False: another session keeps it from
        that. After an error the next call goes on behind the index that met it."""
        self._is_clean = False
        async with self._session() as connection:
            if not await self._lock(connection):
                return False
            indexes = await self._clean(connection)
            self._leave_out({index.name for index in indexes if not index.is_owner})
            while self._pending:
                await self._visit(connection, self._pending.pop(0), scope)
        self._is_clean = True
        return True

    async def _now(self) -> datetime:
        limit = STATEMENT_LIMIT.total_seconds()
        async with self.context.connection.use("reading the clock", limit) as connection:
            return await index_now(connection)

    # -- the session

    @asynccontextmanager
    async def _session(self) -> AsyncGenerator[Connection]:
        with anyio.fail_after(CONNECT_TIMEOUT):
            connection = await self._connect()
        try:
            await self._limit(connection)
            yield connection
        finally:
            await close(connection)

    async def _limit(self, connection: Connection) -> None:
        """The limits of every step but a rebuild."""
        with _answered(STATEMENT_LIMIT):
            await index_limits(
                connection, statement=STATEMENT_LIMIT, lock=LOCK_LIMIT, idle=IDLE_LIMIT
            )

    async def _lock(self, connection: Connection) -> bool:
        """Whether this is the only reindexer, until the end of the session."""
        with _answered(STATEMENT_LIMIT):
            is_locked = await index_lock(connection, self.context.schema)
        if is_locked:
            self._lock_failures.recovered()
        else:
            self._lock_failures.failed(REINDEXING_POSTPONED, level="info")
        return is_locked

    # -- artifacts

    async def _clean(self, connection: Connection) -> list[Index]:
        """Drop what interrupted rebuilds left, of this process or another. Returns the indexes."""
        with _answered(STATEMENT_LIMIT):
            indexes = await index_list(connection, self.context.schema, self._names)
        self._warn_of_missing({index.name for index in indexes})
        for index in indexes:
            if not index.is_held:
                await self._drop_artifacts(connection, index.name, self.context.fence.expect_valid)
        return indexes

    def _warn_of_missing(self, found: set[str]) -> None:
        missing = [name for name in self._names if name not in found]
        if missing and missing != self._missing:
            self.log.warning(
                CONFIGURED_INDEXES_NOT_FOUND, advice="check reindexer_index_names", indexes=missing
            )
        self._missing = missing

    def _leave_out(self, not_owned: set[str]) -> None:
        left_out = [name for name in self._pending if name in not_owned]
        if left_out:
            self._pending = [name for name in self._pending if name not in not_owned]
            self.log.warning(
                INDEXES_OF_ANOTHER_OWNER_SKIPPED,
                advice="make the client's role the owner of the tables, or set "
                "reindexer_index_names=[]",
                indexes=left_out,
            )

    async def _drop_artifacts(
        self, connection: Connection, name: str, before_each: Callable[[], None]
    ) -> bool:
        """Drop those that nobody builds. Returns whether all of those are gone."""
        with _answered(STATEMENT_LIMIT):
            artifacts = await index_artifacts(connection, self.context.schema, name)
        is_done = True
        for artifact in artifacts:
            if not artifact.is_ownerless:
                continue
            before_each()
            try:
                with _answered(STATEMENT_LIMIT):
                    await index_drop(connection, artifact)
            except PostgresError as error:
                if connection.is_closed():
                    raise
                is_done = False
                self.log.debug(
                    INDEX_ARTIFACT_DROP_FAILED, index=artifact.name, error=describe(error)
                )
            else:
                self.log.info(INDEX_ARTIFACT_DROPPED, index=artifact.name)
        return is_done

    async def _clean_up(self, connection: Connection, name: str) -> None:
        """Drop what the rebuild left that a stop has just interrupted: before it there was
        nothing. This process may not lead any more, but its session still excludes others."""
        with anyio.move_on_after(CLEAN_UP_LIMIT, shield=True):
            try:
                await self._limit(connection)  # returns when the server has ended the rebuild
                while True:
                    if await self._drop_artifacts(connection, name, _nothing):
                        return
                    await anyio.sleep(DROP_AGAIN)
            except DATABASE_ERRORS as error:
                self.log.debug(INDEX_CLEANUP_FAILED, index=name, error=describe(error))
        self.log.warning(INDEX_ARTIFACTS_LEFT_BEHIND, index=name)

    # -- rebuilding

    async def _visit(self, connection: Connection, name: str, scope: StopScope) -> None:
        with _answered(STATEMENT_LIMIT):
            found = await index_list(connection, self.context.schema, [name])
        if not found:
            return
        reason = await self._reason_to_skip(connection, found[0])
        if reason is None:
            await self._rebuild(connection, found[0], scope)
        else:
            self.log.warning(INDEX_REBUILD_FAILED, index=name, reason=reason)

    async def _reason_to_skip(self, connection: Connection, index: Index) -> str | None:
        if index.is_held:
            return "another session builds an index of its table"
        postponed = Postponement.read(index.comment)
        if postponed is not None and index.read_at < postponed.until:
            times = "once" if postponed.timeouts == 1 else f"{postponed.timeouts} times"
            return f"its rebuild timed out {times}; next after {postponed.until}"
        with _answered(STATEMENT_LIMIT):
            artifacts = await index_artifacts(connection, self.context.schema, index.name)
        if artifacts:
            names = ", ".join(artifact.name for artifact in artifacts)
            return f"what may be left of other rebuilds could not be dropped: {names}"
        return None

    async def _rebuild(self, connection: Connection, index: Index, scope: StopScope) -> None:
        with _answered(STATEMENT_LIMIT):
            await index_limits(connection, statement=self._timeout, lock=None, idle=IDLE_LIMIT)
        self.context.fence.expect_valid()
        began = self.context.timer.boottime()
        try:
            with _answered(self._timeout):
                await index_rebuild(connection, index)
        except anyio.get_cancelled_exc_class():
            if scope.cause is not None:
                await self._clean_up(connection, index.name)
            raise
        except PostgresError as error:
            if connection.is_closed():
                raise
            await self._limit(connection)
            await self._failed(connection, index, error, self.context.timer.boottime() - began)
        else:
            await self._limit(connection)
            await self._rebuilt(connection, index, self.context.timer.boottime() - began)

    async def _failed(
        self, connection: Connection, index: Index, error: PostgresError, seconds: float
    ) -> None:
        """The others are rebuilt nevertheless. What the rebuild left stays until the next run."""
        limit = self._timeout
        if limit is None or not is_statement_timeout(error) or seconds < limit.total_seconds():
            self.log.warning(INDEX_REBUILD_FAILED, index=index.name, reason=describe(error))
            return
        postponed = Postponement.after(index.comment, self._run_at)
        self.log.warning(
            INDEX_REBUILD_TIMED_OUT,
            index=index.name,
            timeout=limit.total_seconds(),
            timeouts=postponed.timeouts,
            next_after=postponed.until.isoformat(),
        )
        await self._describe(connection, index, postponed.written(index.comment))

    async def _rebuilt(self, connection: Connection, index: Index, seconds: float) -> None:
        with _answered(STATEMENT_LIMIT):
            found = await index_list(connection, self.context.schema, [index.name])
        self.log.info(
            INDEX_REBUILT,
            index=index.name,
            seconds=round(seconds, 3),
            bytes_before=index.size,
            bytes_after=found[0].size if found else None,
        )
        if without_postponement(index.comment) != index.comment:
            await self._describe(connection, index, without_postponement(index.comment))

    async def _describe(self, connection: Connection, index: Index, comment: str) -> None:
        with _answered(STATEMENT_LIMIT):
            await index_comment(connection, self.context.schema, name=index.name, comment=comment)


def reindexers(context: TermContext) -> list[Reindexer]:
    """The reindexer of a term. There is none without indexes to rebuild, or if only a pooler leads
    to the database."""
    names = context.config.reindexer_index_names
    names = INDEX_NAMES_DEFAULT if names is None else names
    if not names:
        return []
    if context.connect_direct is None:
        get_logger().info(
            REINDEXING_DISABLED, advice="set listen_url to a URL that bypasses the pooler"
        )
        return []
    return [Reindexer(context, names, context.connect_direct)]


def _answered(limit: timedelta | None) -> AbstractContextManager[object]:
    """Wait for a statement a little longer than the server lets it run."""
    seconds = None if limit is None else limit.total_seconds() + ANSWER_MARGIN
    return anyio.fail_after(seconds)


def _nothing() -> None:
    """Before a step that needs no trust."""
