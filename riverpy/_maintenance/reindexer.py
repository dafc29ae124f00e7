"""Reindexer: rebuilds River's indexes concurrently, and drops leftover indexes. A leftover index is
an unfinished index that remains in the database after a rebuild was interrupted."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
    close_connection,
    describe_error,
    is_server_statement_timeout,
)
from riverpy._postgres.indexes import (
    index_drop_leftover,
    index_get_server_time,
    index_list,
    index_list_leftovers,
    index_rebuild,
    index_set_comment,
    index_set_timeouts,
    index_try_rebuild_lock,
)
from riverpy._postgres.tracing import suppress_tracing
from riverpy.schedules import find_next_due_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.indexes import Index
    from riverpy.schedules import PeriodicSchedule

ResultT = TypeVar("ResultT")

STATEMENT_TIMEOUT = timedelta(seconds=5)
"""The server's `statement_timeout` for all statements of the session except a rebuild."""
LOCK_TIMEOUT = timedelta(seconds=1)
"""The server's `lock_timeout` for all statements of the session except a rebuild."""
IDLE_SESSION_TIMEOUT = timedelta(seconds=30)
"""The server's `idle_session_timeout` for the session. If the process is frozen or unreachable, the
server ends the idle session, which releases the session's lock."""
CLIENT_TIMEOUT_MARGIN = 5.0
"""The client's timeout of a statement is this number of seconds longer than the server's. When the
client's timeout expires, the session is closed."""
LEFTOVER_DROP_TIMEOUT = 15.0
"""If the reindexer is stopped during a rebuild, it drops the leftover indexes of this rebuild
before it stops. It tries this for at most this number of seconds."""
LEFTOVER_DROP_RETRY_DELAY = 0.1
"""Seconds between two attempts to drop the leftover indexes of an interrupted rebuild."""
REINDEX_LOCK_RETRY_DELAY = 5.0
"""Seconds until the next attempt to acquire the reindex lock of the schema, if another session
holds it. Only the session that holds the lock rebuilds indexes. After a process was killed, the
server needs a moment to release the lock of its session."""
CLOCK_READ_INTERVAL = 3600.0
"""The longest time between two reads of the server's clock, in seconds."""
REBUILD_POSTPONEMENT_DAYS = (1, 2, 4)
"""Days for which the rebuild of an index is postponed: after the first timeout, after the second
consecutive one, and after each further one."""
_POSTPONEMENT_PATTERN = re.compile(
    r"\n?riverpy: (\d{1,6}) rebuilds timed out, next after (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)Z\Z"
)


class DailySchedule:
    """The default schedule of the reindexer: every day at midnight, UTC. It is not a cron schedule,
    because each worker would then have to load the modules for cron expressions."""

    def next(self, after: datetime, /) -> datetime:
        """Return the first midnight after `after`."""
        midnight = after.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight + timedelta(days=1)


class RebuildPostponement(NamedTuple):
    """The delay of the next rebuild of an index whose last rebuild timed out. It is stored in the
    index's comment, where every leader and operator can read it."""

    timeout_count: int
    """The number of consecutive rebuilds that timed out."""
    postponed_until: datetime

    @classmethod
    def parse_comment(cls, comment: str) -> RebuildPostponement | None:
        """Return the postponement in the comment of an index. None: the comment contains no valid
        one."""
        found = _POSTPONEMENT_PATTERN.search(comment)
        if found is None:
            return None
        try:
            return cls(int(found[1]), datetime.fromisoformat(found[2]).replace(tzinfo=UTC))
        except ValueError:  # someone has edited the comment
            return None

    @classmethod
    def make_after_timeout(cls, comment: str, run_due_at: datetime) -> RebuildPostponement:
        """Return the postponement to store when another rebuild of the index has timed out.
        `comment` is the current comment of the index, which may contain the last postponement.
        `run_due_at` is the time at which the reindexer's current run was due. The postponement
        starts at this time."""
        before = cls.parse_comment(comment)
        timeouts = 1 if before is None else before.timeout_count + 1
        days = REBUILD_POSTPONEMENT_DAYS[min(timeouts, len(REBUILD_POSTPONEMENT_DAYS)) - 1]
        return cls(timeouts, run_due_at + timedelta(days=days))

    def append_to_comment(self, comment: str) -> str:
        """Return the comment with this postponement appended."""
        until = self.postponed_until.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat()
        line = f"riverpy: {self.timeout_count} rebuilds timed out, next after {until}Z"
        return "\n".join(filter(None, (remove_postponement(comment), line)))


def remove_postponement(comment: str) -> str:
    """Return the comment of an index without the postponement."""
    return _POSTPONEMENT_PATTERN.sub("", comment)


class Reindexer(MaintenanceService):
    """Rebuilds indexes on a schedule. Each run uses a new database session."""

    name = "reindexer"

    def __init__(
        self,
        context: TermContext,
        index_names: Sequence[str],
        connect: Callable[[], Awaitable[Connection]],
    ) -> None:
        """Create a reindexer for the named indexes. `connect` opens a database session. It must not
        connect to a pooler in transaction mode."""
        super().__init__(context)
        config = context.config
        self._index_names = tuple(dict.fromkeys(index_names))
        self._connect = connect
        self._schedule: PeriodicSchedule = config.reindexer_schedule or DailySchedule()
        self._rebuild_timeout = config.reindexer_timeout
        self._next_run_at: datetime | None = None
        self._run_due_at: datetime
        """The time at which the current run was due. A postponement of an index counts from this
        time, so that a postponement of one day has ended when the next daily run begins."""
        self._pending_index_names: list[str] = []
        self._has_first_run_begun = self._are_leftovers_dropped = False
        self._lock_failure_log = RepeatedFailureLog(self.log)
        self._missing_index_names: list[str] = []

    async def run_once(self, scope: StopScope) -> float:
        """Rebuild the indexes if a run is due. The first call in a term only drops leftover
        indexes."""
        now = await self._read_server_time()
        if not self._has_first_run_begun:
            self._has_first_run_begun, self._run_due_at = True, now
            self._next_run_at = find_next_due_time(self._schedule, now)
        elif self._next_run_at is not None and now >= self._next_run_at:
            # If several runs were missed, one run replaces all of them.
            self._run_due_at = max(self._next_run_at, now - timedelta(seconds=CLOCK_READ_INTERVAL))
            self._pending_index_names = list(self._index_names)
            self._next_run_at = find_next_due_time(self._schedule, now)
        if self._pending_index_names or not self._are_leftovers_dropped:
            if not await self._rebuild_pending_indexes(scope):
                return REINDEX_LOCK_RETRY_DELAY
            now = await self._read_server_time()
        if self._next_run_at is None:
            return CLOCK_READ_INTERVAL
        return min(max((self._next_run_at - now).total_seconds(), 0.0), CLOCK_READ_INTERVAL)

    async def _rebuild_pending_indexes(self, scope: StopScope) -> bool:
        """Drop leftover indexes, and rebuild the pending indexes. Return False if another session
        holds the reindex lock. After an error, the next call continues with the index after
        the one that failed."""
        self._are_leftovers_dropped = False
        async with self._open_session() as connection:
            if not await self._try_acquire_reindex_lock(connection):
                return False
            indexes = await self._drop_all_leftover_indexes(connection)
            self._skip_indexes_of_other_owners(indexes)
            while self._pending_index_names:
                name = self._pending_index_names.pop(0)
                await self._rebuild_index_if_possible(connection, name, scope)
        self._are_leftovers_dropped = True
        return True

    async def _read_server_time(self) -> datetime:
        async with self.acquire_read_connection("reading the clock") as connection:
            return await index_get_server_time(connection)

    # -- the database session

    @asynccontextmanager
    async def _open_session(self) -> AsyncGenerator[Connection]:
        with suppress_tracing(trace_internal=self.context.config.trace_internal):
            with anyio.fail_after(CONNECT_TIMEOUT):
                connection = await self._connect()
            try:
                await _set_server_timeouts(connection)
                yield connection
            finally:
                await close_connection(connection)

    async def _try_acquire_reindex_lock(self, connection: Connection) -> bool:
        """Try to acquire the reindex lock of the schema, so that no other reindexer works until
        this session ends. Return whether the lock was acquired."""
        is_locked = await _execute_with_timeout(index_try_rebuild_lock(connection, self.schema))
        if is_locked:
            self._lock_failure_log.log_recovery()
        else:
            self._lock_failure_log.log_failure(REINDEXING_POSTPONED, level="info")
        return is_locked

    async def _read_indexes(self, connection: Connection, names: Sequence[str]) -> list[Index]:
        return await _execute_with_timeout(index_list(connection, self.schema, names))

    # -- leftover indexes: the unfinished indexes of an interrupted rebuild

    async def _drop_all_leftover_indexes(self, connection: Connection) -> list[Index]:
        """Drop the leftover indexes of the configured indexes, also those from rebuilds by other
        processes. If another session is building an index of a table, the indexes of this table are
        left out. Return the configured indexes that exist."""
        indexes = await self._read_indexes(connection, self._index_names)
        self._warn_of_missing_indexes({index.name for index in indexes})
        for index in indexes:
            if not index.is_table_being_indexed:
                await self._drop_leftover_indexes(connection, index.name, must_be_leader=True)
        return indexes

    def _warn_of_missing_indexes(self, found_names: set[str]) -> None:
        missing = [name for name in self._index_names if name not in found_names]
        if missing and missing != self._missing_index_names:
            self.log.warning(
                CONFIGURED_INDEXES_NOT_FOUND, advice="check reindexer_index_names", indexes=missing
            )
        self._missing_index_names = missing

    def _skip_indexes_of_other_owners(self, indexes: Sequence[Index]) -> None:
        """Keep only those pending indexes that the client's database role owns. Log the names of
        the other pending indexes."""
        not_owned = {index.name for index in indexes if not index.is_owned_by_role}
        skipped = [name for name in self._pending_index_names if name in not_owned]
        if skipped:
            self._pending_index_names = [n for n in self._pending_index_names if n not in not_owned]
            self.log.warning(
                INDEXES_OF_ANOTHER_OWNER_SKIPPED,
                advice="make the client's role the owner of the tables, or set "
                "reindexer_index_names=[]",
                indexes=skipped,
            )

    async def _drop_leftover_indexes(
        self, connection: Connection, name: str, *, must_be_leader: bool
    ) -> bool:
        """Drop the leftover indexes of the index `name`. Return False if a drop has failed. A
        leftover index is kept if it is valid, if another session is building it, or if the client's
        role does not own it. `must_be_leader`: raise FencedOutError if this process is not the
        leader any more."""
        is_done = True
        for artifact in await _execute_with_timeout(
            index_list_leftovers(connection, self.schema, name)
        ):
            if not artifact.is_droppable:
                continue
            if must_be_leader:
                self.context.fence.expect_held()
            try:
                await _execute_with_timeout(index_drop_leftover(connection, artifact))
            except PostgresError as error:
                if connection.is_closed():
                    raise
                is_done = False
                self.log.debug(
                    INDEX_ARTIFACT_DROP_FAILED, index=artifact.name, error=describe_error(error)
                )
            else:
                self.log.info(INDEX_ARTIFACT_DROPPED, index=artifact.name)
        return is_done

    async def _drop_leftover_indexes_after_stop(self, connection: Connection, name: str) -> None:
        """Drop the leftover indexes of a rebuild that was interrupted because the reindexer was
        stopped. This process may not be the leader any more, but its session still holds the
        reindex lock, so no other reindexer works."""
        with anyio.move_on_after(LEFTOVER_DROP_TIMEOUT, shield=True):
            try:
                # The server executes this statement only after the cancelled rebuild has ended, so
                # the statement also waits for that end.
                await _set_server_timeouts(connection)
                while True:
                    if await self._drop_leftover_indexes(connection, name, must_be_leader=False):
                        return
                    await anyio.sleep(LEFTOVER_DROP_RETRY_DELAY)
            except DATABASE_ERRORS as error:
                self.log.debug(INDEX_CLEANUP_FAILED, index=name, error=describe_error(error))
        self.log.warning(INDEX_ARTIFACTS_LEFT_BEHIND, index=name)

    # -- rebuilding

    async def _rebuild_index_if_possible(
        self, connection: Connection, name: str, scope: StopScope
    ) -> None:
        for index in await self._read_indexes(connection, [name]):
            reason = await self._find_reason_to_skip(connection, index)
            if reason is None:
                await self._rebuild_index(connection, index, scope)
            else:
                self.log.warning(INDEX_REBUILD_FAILED, index=name, reason=reason)

    async def _find_reason_to_skip(self, connection: Connection, index: Index) -> str | None:
        """Return why the index cannot be rebuilt now, as text. None: it can be rebuilt."""
        if index.is_table_being_indexed:
            return "another session builds an index of its table"
        postponed = RebuildPostponement.parse_comment(index.comment)
        if postponed is not None and index.read_at < postponed.postponed_until:
            times = "once" if postponed.timeout_count == 1 else f"{postponed.timeout_count} times"
            return f"its rebuild timed out {times}; next after {postponed.postponed_until}"
        artifacts = await _execute_with_timeout(
            index_list_leftovers(connection, self.schema, index.name)
        )
        if artifacts:
            names = ", ".join(artifact.name for artifact in artifacts)
            return f"what may be left of other rebuilds could not be dropped: {names}"
        return None

    async def _rebuild_index(self, connection: Connection, index: Index, scope: StopScope) -> None:
        await _set_server_timeouts(connection, statement=self._rebuild_timeout, lock=None)
        self.context.fence.expect_held()
        began = self.context.timer.seconds_since_boot()
        try:
            await _execute_with_timeout(index_rebuild(connection, index), self._rebuild_timeout)
        except anyio.get_cancelled_exc_class():
            if scope.cause is not None:
                await self._drop_leftover_indexes_after_stop(connection, index.name)
            raise
        except PostgresError as error:
            if connection.is_closed():
                raise
            await _set_server_timeouts(connection)
            await self._record_rebuild_failure(
                connection, index, error, self.context.timer.seconds_since_boot() - began
            )
        else:
            await _set_server_timeouts(connection)
            await self._record_rebuild_success(
                connection, index, self.context.timer.seconds_since_boot() - began
            )

    async def _record_rebuild_failure(
        self, connection: Connection, index: Index, error: PostgresError, seconds: float
    ) -> None:
        """Log a failed rebuild. If the rebuild timed out, postpone the next rebuild of the index.
        The leftover indexes of the failed rebuild are dropped in the next run."""
        limit = self._rebuild_timeout
        if (
            limit is None
            or not is_server_statement_timeout(error)
            or seconds < limit.total_seconds()
        ):
            self.log.warning(INDEX_REBUILD_FAILED, index=index.name, reason=describe_error(error))
            return
        postponed = RebuildPostponement.make_after_timeout(index.comment, self._run_due_at)
        self.log.warning(
            INDEX_REBUILD_TIMED_OUT,
            index=index.name,
            timeout=limit.total_seconds(),
            timeouts=postponed.timeout_count,
            next_after=postponed.postponed_until.isoformat(),
        )
        await self._set_index_comment(connection, index, postponed.append_to_comment(index.comment))

    async def _record_rebuild_success(
        self, connection: Connection, index: Index, seconds: float
    ) -> None:
        """Log a successful rebuild, and remove the postponement from the comment of the index."""
        found = await self._read_indexes(connection, [index.name])
        self.log.info(
            INDEX_REBUILT,
            index=index.name,
            seconds=round(seconds, 3),
            bytes_before=index.size_bytes,
            bytes_after=found[0].size_bytes if found else None,
        )
        await self._set_index_comment(connection, index, remove_postponement(index.comment))

    async def _set_index_comment(self, connection: Connection, index: Index, comment: str) -> None:
        if comment != index.comment:
            await _execute_with_timeout(
                index_set_comment(connection, self.schema, name=index.name, comment=comment)
            )


def make_reindexers(context: TermContext) -> list[Reindexer]:
    """Return a list with one reindexer, which runs while this client is the leader of the domain
    `default` or holds the schema lease. The list is empty if there are no indexes to rebuild, or if
    all URLs lead to a pooler in transaction mode."""
    names = context.config.reindexer_index_names
    if not names:
        return []
    if context.open_direct_connection is None:
        get_logger().info(
            REINDEXING_DISABLED, advice="set listen_url to a URL that bypasses the pooler"
        )
        return []
    return [Reindexer(context, names, context.open_direct_connection)]


async def _execute_with_timeout(
    statement: Awaitable[ResultT], limit: timedelta | None = STATEMENT_TIMEOUT
) -> ResultT:
    """Execute a statement, and return its result. `limit` is the current `statement_timeout` of the
    session. None: the statement may take any time.

    Raises:
        TimeoutError: the statement took `CLIENT_TIMEOUT_MARGIN` seconds longer than `limit`.
    """
    with anyio.fail_after(None if limit is None else limit.total_seconds() + CLIENT_TIMEOUT_MARGIN):
        return await statement


async def _set_server_timeouts(
    connection: Connection,
    statement: timedelta | None = STATEMENT_TIMEOUT,
    lock: timedelta | None = LOCK_TIMEOUT,
) -> None:
    """Set the timeouts of the session on the server: `statement_timeout` to `statement`, and
    `lock_timeout` to `lock`. None: no timeout. Also set `idle_session_timeout` to
    `IDLE_SESSION_TIMEOUT`, and turn off `transaction_timeout`."""
    await _execute_with_timeout(
        index_set_timeouts(
            connection,
            statement_timeout=statement,
            lock_timeout=lock,
            idle_timeout=IDLE_SESSION_TIMEOUT,
        )
    )
