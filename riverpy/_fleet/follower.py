"""FleetFollower: receives the events of all workers for one client, and reads the jobs that this
client watches.

All subscriptions and watches of a client share one connection for LISTEN. The follower announces to
the workers which events the client wants to receive. One statement reads all watched jobs that have
changed. The follower executes the statement after an event of a watched job, and at least once a
second, because events may be lost and River in Go sends none.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

import anyio

from riverpy._fleet.filters import FollowFilter, merge_filters
from riverpy._fleet.job_events import make_event
from riverpy._fleet.messages import (
    WantedEventsAnnouncement,
    decode_event_payload,
    encode_announcements,
    encode_ascii_json,
)
from riverpy._fleet.row_reader import WatchClosedError
from riverpy._log import get_logger
from riverpy._log_events import FLEET_FOLLOWING_FAILED
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    describe_error,
    is_permanent_statement_error,
)
from riverpy._postgres.fleet import (
    FLEET_TOPIC,
    FOLLOW_TOPIC,
    fleet_notify,
    fleet_read_changed_jobs,
)
from riverpy._postgres.tracing import suppress_tracing
from riverpy._stream import StreamGroup
from riverpy._waiting.background_task import BackgroundTask
from riverpy._waiting.pool_connection import make_read_error
from riverpy.job import JobRow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from riverpy._fleet.messages import EventMessage, MessageHeader
    from riverpy._fleet.row_reader import RowReader
    from riverpy._fleet.subscription import FleetStream
    from riverpy._postgres.driver import Pool, Transaction
    from riverpy._waiting.listener import SharedListener
    from riverpy._waiting.pool_connection import SharedPoolConnection

ANNOUNCEMENT_INTERVAL = 10.0
"""The time in seconds after which the client announces to the workers again which events it wants
to receive."""
ANNOUNCEMENT_RETRY_DELAY = 1.0
"""The delay in seconds before the client retries a failed announcement."""
ANNOUNCEMENT_TIMEOUT = 5.0
"""How long the start of a subscription waits until its first announcement is sent, in seconds."""
WATCHED_JOB_POLL_INTERVAL = 1.0
"""The time in seconds between two reads of the watched jobs if no event arrives."""
WATCHED_JOB_READ_INTERVAL_MIN = 0.02
"""The minimum time between two reads of the watched jobs, in seconds."""
STATEMENT_TIMEOUT = 10.0
"""The timeout of a statement that sends an announcement or reads watched jobs, in seconds."""
UNUSED_FOLLOWER_TIMEOUT = 2.0
"""How long the client still receives events after its last subscription or watch has ended, in
seconds."""


class FleetFollower(StreamGroup["FleetStream"]):
    """Receives events for all subscriptions with `fleet=True` and all job watches of one client."""

    def __init__(
        self,
        get_open_pool: Callable[[], Pool],
        connection: SharedPoolConnection,
        listener: SharedListener,
        *,
        schema: str | None,
        trace_internal: bool,
    ) -> None:
        """Create a follower without subscriptions.

        Args:
            get_open_pool: returns the client's pool. It raises ClientStateError if the client is
                not open.
            connection: the connection for statements.
            listener: the connection for LISTEN.
            schema: the schema of River's tables. None: the search path decides.
            trace_internal: whether OpenTelemetry's instrumentation of the driver makes spans for
                the statements of the follower.
        """
        super().__init__()
        self._get_open_pool, self._connection, self._listener = get_open_pool, connection, listener
        self._schema, self._trace_internal = schema, trace_internal
        self._id = secrets.token_hex(8)
        """The id of this follower in its announcements."""
        self._readers_by_id: dict[int, WeakSet[RowReader]] = {}
        """The open readers by job id. The references are weak: Python deletes a reader when no code
        uses its watch any more."""
        self._version_by_id: dict[int, str] = {}
        """The version (`xmin`) of the last row that was read for each watched job, by job id.
        Empty: the row must be passed to a new reader."""
        self._ids_to_read: set[int] = set()
        self._announce_at = self._poll_at = self._read_at = 0.0
        """The monotonic times of the next announcement (`_announce_at`), of the next poll of the
        watched jobs (`_poll_at`) and of their last read (`_read_at`)."""
        self._change_number = self._announced_number = 0
        """`_change_number` counts how often the events that the client wants may have changed.
        `_announced_number` is the number of the last change that was announced to the workers."""
        self._announced = asyncio.Event()
        self._woken = asyncio.Event()
        self._unused_since: float | None = None
        self._is_stopped = False
        self._task = BackgroundTask(
            "fleet follower", self._run, self._end_subscriptions_and_watches
        )
        self._log = get_logger().with_rate_limit()

    # -- subscriptions and watches

    def add_stream(self, stream: FleetStream) -> None:
        self._require_open()
        super().add_stream(stream)
        self._announce_wanted_events_soon()

    def remove_stream(self, stream: FleetStream) -> None:
        super().remove_stream(stream)
        self._announce_wanted_events_soon()

    def add_row_reader(self, reader: RowReader) -> None:
        """Start passing the row of the job `reader.job_id` to the reader: at the next read from the
        database, and after each change."""
        self._require_open()
        self._readers_by_id.setdefault(reader.job_id, WeakSet()).add(reader)
        self._version_by_id[reader.job_id] = ""  # send the row to the new reader
        self._ids_to_read.add(reader.job_id)
        self._announce_wanted_events_soon()

    def remove_row_reader(self, reader: RowReader) -> None:
        """Stop passing the row of the job `reader.job_id` to the reader. Other readers of the same
        job still receive the row."""
        if (readers := self._readers_by_id.get(reader.job_id)) is not None:
            readers.discard(reader)
        self._announce_wanted_events_soon()

    def _require_open(self) -> None:
        """Raise ClientStateError if the client is not open or was closed."""
        self._get_open_pool()
        if self._is_stopped:
            raise WatchClosedError

    def _announce_wanted_events_soon(self) -> None:
        """Make the background task announce to the workers which events the client wants now. Start
        the task if it is not running."""
        self._change_number += 1
        self._announce_at = 0.0
        self._woken.set()
        if self._is_used:
            self._task.start()

    @property
    def _is_used(self) -> bool:
        self._forget_unused_readers()
        return bool(self._open_streams or self._readers_by_id)

    def _forget_unused_readers(self) -> None:
        unused = [job_id for job_id, readers in self._readers_by_id.items() if not readers]
        for job_id in unused:
            del self._readers_by_id[job_id]
            self._version_by_id.pop(job_id, None)
            self._ids_to_read.discard(job_id)

    async def wait_until_wanted_events_announced(self) -> None:
        """Wait until the follower has announced to the workers which events the client wants now,
        but for at most `ANNOUNCEMENT_TIMEOUT` seconds. Without a connection, the follower announces
        the events later."""
        number = self._change_number
        with anyio.move_on_after(ANNOUNCEMENT_TIMEOUT):
            while self._announced_number < number and self._task.is_running:
                self._announced.clear()
                await self._announced.wait()

    async def stop(self) -> None:
        """End all subscriptions and watches. The client calls this when it closes. The follower
        cannot be used again."""
        self._is_stopped = True
        self.close()
        for readers in self._readers_by_id.values():
            for reader in list(readers):
                reader.set_error(WatchClosedError())
        self._readers_by_id.clear()
        self._version_by_id.clear()
        self._ids_to_read.clear()
        await self._task.close()
        self._announced.set()

    # -- notifications

    def _receive_message(self, payload: str) -> None:
        decoded = decode_event_payload(payload)
        if decoded is None:
            return
        header, messages = decoded
        if self._readers_by_id:
            for message in messages:
                if message.job_id in self._readers_by_id:
                    self._ids_to_read.add(message.job_id)
            if self._ids_to_read:
                self._woken.set()
        if self._open_streams:
            self._deliver_events(header, messages)

    def _deliver_events(self, header: MessageHeader, messages: Iterable[EventMessage]) -> None:
        if header.dropped > 0:
            for stream in self._open_streams:
                stream.add_dropped_by_workers(header.dropped)
        for message in messages:
            streams = [
                one for one in self._open_streams if message.matches_any([one.follow_filter])
            ]
            if streams and (event := make_event(message, header.client)) is not None:
                for stream in streams:
                    stream.put(event)

    def _read_all_watched_jobs_soon(self) -> None:
        """Make the background task read all watched jobs. The listener calls this after LISTEN has
        started, because earlier notifications may be lost."""
        self._ids_to_read.update(self._readers_by_id)
        self._woken.set()

    # -- the background task

    async def _run(self) -> None:
        self._poll_at = time.monotonic()
        with self._listener.listening(
            FLEET_TOPIC, self._receive_message, self._read_all_watched_jobs_soon
        ):
            while not await self._announce_end_if_unused():
                await self._wait_until_work_is_due()
                await self._announce_wanted_events_if_due()
                await self._read_watched_jobs()

    async def _announce_end_if_unused(self) -> bool:
        """If there has been no subscription and no watch for `UNUSED_FOLLOWER_TIMEOUT` seconds,
        announce to the workers that this follower has ended. Return whether the background task can
        end."""
        now = time.monotonic()
        if self._is_used:
            self._unused_since = None
            return False
        if self._unused_since is None:
            self._unused_since = now
        if now - self._unused_since < UNUSED_FOLLOWER_TIMEOUT:
            return False
        self._unused_since = None
        await self._send_announcements(
            [encode_ascii_json(WantedEventsAnnouncement(self._id, is_end=True))]
        )
        return not self._is_used

    async def _wait_until_work_is_due(self) -> None:
        """Wait until the background task has work to do: an announcement, a read of watched jobs,
        or the end of an unused follower. When `_woken` is set, the time of the next work is
        computed again."""
        while (seconds := self._compute_due_time() - time.monotonic()) > 0:
            self._woken.clear()
            with anyio.move_on_after(seconds):
                await self._woken.wait()

    def _compute_due_time(self) -> float:
        if not self._is_used:
            return (
                0.0 if self._unused_since is None else self._unused_since + UNUSED_FOLLOWER_TIMEOUT
            )
        due_at = self._announce_at if self._is_listening else math.inf
        if self._readers_by_id:
            due_at = min(due_at, self._poll_at)
        if self._ids_to_read:
            due_at = min(due_at, self._read_at + WATCHED_JOB_READ_INTERVAL_MIN)
        return due_at

    @property
    def _is_listening(self) -> bool:
        return self._listener.is_listening_on(FLEET_TOPIC)

    async def _announce_wanted_events_if_due(self) -> None:
        if time.monotonic() < self._announce_at or not self._is_listening or not self._is_used:
            return
        number = self._change_number
        filters = [stream.follow_filter for stream in self._open_streams]
        if self._readers_by_id:
            filters.append(FollowFilter(job_ids=frozenset(self._readers_by_id)))
        payloads = encode_announcements(self._id, merge_filters(filters))
        self._announce_at = time.monotonic() + ANNOUNCEMENT_INTERVAL
        if await self._send_announcements(payloads):
            self._announced_number = number
            self._announced.set()
        else:
            self._announce_at = time.monotonic() + ANNOUNCEMENT_RETRY_DELAY

    async def _send_announcements(self, payloads: list[str]) -> bool:
        try:
            async with self._acquire_connection("announcing followed events") as connection:
                return await fleet_notify(connection, self._schema, FOLLOW_TOPIC, payloads)
        except DATABASE_ERRORS as error:
            self._log.debug(FLEET_FOLLOWING_FAILED, error=describe_error(error))
            return False

    @asynccontextmanager
    async def _acquire_connection(self, purpose: str) -> AsyncGenerator[Transaction]:
        with suppress_tracing(trace_internal=self._trace_internal):
            async with self._connection.acquire(purpose, STATEMENT_TIMEOUT) as connection:
                yield connection

    async def _read_watched_jobs(self) -> None:
        """Read the watched jobs for which an event has arrived. Every
        `WATCHED_JOB_POLL_INTERVAL` seconds, read all watched jobs."""
        now = time.monotonic()
        if now >= self._poll_at:
            self._forget_unused_readers()
            self._ids_to_read.update(self._readers_by_id)
            self._poll_at = now + WATCHED_JOB_POLL_INTERVAL
        versions = {
            job_id: self._version_by_id.get(job_id, "")
            for job_id in self._ids_to_read
            if job_id in self._readers_by_id
        }
        self._ids_to_read.clear()
        if not versions:
            return
        try:
            await self._read_changed_rows(versions)
        except DATABASE_ERRORS as error:
            if is_permanent_statement_error(error):
                await self._read_rows_one_by_one(versions)
            else:  # a temporary error: the next poll reads these jobs
                self._log.debug(FLEET_FOLLOWING_FAILED, error=describe_error(error))
        finally:
            self._read_at = time.monotonic()

    async def _read_changed_rows(self, version_by_id: dict[int, str]) -> None:
        """Read the jobs whose version differs from their version in `version_by_id`, and pass each
        row to the readers of its job. If a job does not exist, pass None."""
        async with self._acquire_connection("reading watched jobs") as connection:
            changed = await fleet_read_changed_jobs(connection, self._schema, version_by_id)
        for job in changed:
            row = None if job.row is None else JobRow(job.row)
            readers = list(self._readers_by_id.get(job.id, ()))
            if readers:
                self._version_by_id[job.id] = job.version
            for reader in readers:
                reader.set_row(job.version, row)

    async def _read_rows_one_by_one(self, version_by_id: dict[int, str]) -> None:
        """Read the jobs one by one. If the server cannot read a job, only the readers of this job
        receive the error."""
        for job_id, version in version_by_id.items():
            try:
                await self._read_changed_rows({job_id: version})
            except DATABASE_ERRORS as error:
                if is_permanent_statement_error(error):
                    for reader in list(self._readers_by_id.get(job_id, ())):
                        reader.set_error(make_read_error(error))

    def _end_subscriptions_and_watches(self, error: Exception) -> None:
        """End all subscriptions and watches after the background task has failed, so that no reader
        waits forever."""
        self._log.error(FLEET_FOLLOWING_FAILED, exc_info=error)
        for stream in self._open_streams:
            stream.close(error)
        for readers in list(self._readers_by_id.values()):
            for reader in list(readers):
                reader.set_error(error)
        self._announced.set()
