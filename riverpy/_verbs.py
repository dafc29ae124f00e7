"""Verbs: what a client asks of the database in one short transaction each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from riverpy._insert.row import encode_metadata, json_size
from riverpy._names import validate_queue
from riverpy._postgres import jobs, periodic, queues
from riverpy._postgres.damaged_jobs import naming_damage
from riverpy._postgres.driver import UniqueViolationError
from riverpy.errors import ArgsError, ConfigError, NotFoundError, UniqueConflictError
from riverpy.job import JobRow, encode_metadata_value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import timedelta

    from riverpy._postgres.driver import Transaction
    from riverpy.config import Config
    from riverpy.queue import Queue

QUEUE_LIST_LIMIT = 100
NOTIFICATION_SIZE_MAX = 7_999
"""Bytes of a payload; PostgreSQL's limit."""


class Verbs(ABC):
    """The verbs on jobs, queues and periodic jobs. Each takes `tx=`, as `Client.insert` does, and
    runs in a savepoint of it: an error leaves that transaction usable. It raises TransactionError
    where `tx` is in no transaction, aborted or closed."""

    _config: Config

    @abstractmethod
    def _transaction(
        self,
        tx: Transaction | None,
        *,
        isolation: Literal["read_committed"] | None = "read_committed",
    ) -> AbstractAsyncContextManager[Transaction]:
        """A savepoint in the caller's transaction, or a transaction of the client's own, of this
        isolation; None: the session's default."""

    # -- jobs

    async def job_get(self, job_id: int, *, tx: Transaction | None = None) -> JobRow:
        """One job.

        Raises:
            NotFoundError: there is none with this id.
            JobDamagedError: the server cannot read it.
        """
        return await self._one_job(jobs.job_get, job_id, tx)

    async def job_cancel(self, job_id: int, *, tx: Transaction | None = None) -> JobRow:
        """Cancel a job; a running one is told to stop, and is cancelled when it has.

        A completed, cancelled or discarded job stays as it is.

        Raises:
            NotFoundError, JobDamagedError: as `job_get`.
        """
        return await self._one_job(jobs.job_cancel, job_id, tx)

    async def job_retry(self, job_id: int, *, tx: Transaction | None = None) -> JobRow:
        """Make a job available now, with one more attempt if it has none left. A running one stays
        as it is.

        Raises:
            NotFoundError, JobDamagedError: as `job_get`.
            UniqueConflictError: another job holds its unique key now.
        """
        try:
            return await self._one_job(jobs.job_retry, job_id, tx)
        except UniqueViolationError:
            raise UniqueConflictError(
                f"job {job_id} cannot be retried: another job holds its unique key"
            ) from None

    async def job_update(
        self, job_id: int, *, output: object, tx: Transaction | None = None
    ) -> JobRow:
        """Set the output of a job (metadata key `output`), whatever its state.

        What a running job records itself replaces it when the attempt ends.

        Raises:
            ArgsError: the output is not JSON, or larger than 32 MiB when encoded.
            NotFoundError, JobDamagedError: as `job_get`.
        """
        updates = f'{{"output":{encode_metadata_value(output)}}}'
        return await self._one_job(partial(jobs.job_update, updates=updates), job_id, tx)

    async def _one_job(
        self,
        call: Callable[[Transaction, str | None, int], Awaitable[Any]],
        job_id: int,
        tx: Transaction | None,
    ) -> JobRow:
        with naming_damage(job_id):
            async with self._transaction(tx) as connection:
                row = await call(connection, self._config.schema, job_id)
        if row is None:
            raise NotFoundError(f"there is no job {job_id}")
        return JobRow(row)

    # -- queues

    async def queue_get(self, name: str, *, tx: Transaction | None = None) -> Queue:
        """One queue.

        Raises:
            NotFoundError: no client ever worked a queue of this name.
        """
        async with self._transaction(tx) as connection:
            found = await queues.queue_get(connection, self._config.schema, name)
        if found is None:
            raise _no_queue(name)
        return found

    async def queue_list(
        self, *, limit: int = QUEUE_LIST_LIMIT, tx: Transaction | None = None
    ) -> list[Queue]:
        """The queues that clients work or worked not long ago, by name.

        Args:
            limit: how many at most (100).
            tx: as for `insert`.

        Raises:
            ConfigError: `limit` is below 1.
        """
        if limit < 1:
            raise ConfigError(f"limit must be 1 or more, got {limit}")
        async with self._transaction(tx) as connection:
            return await queues.queue_list(connection, self._config.schema, limit)

    async def queue_lags(
        self, names: Sequence[str], *, tx: Transaction | None = None
    ) -> dict[str, timedelta]:
        """How long the oldest due job of each of these queues has waited; zero where none waits.

        Quick however long the queues are: for metrics, and for what scales a fleet.

        Raises:
            ConfigError: the name of a queue is not allowed.
        """
        for name in names:
            validate_queue(name)
        async with self._transaction(tx) as connection:
            return await queues.queue_lag(connection, self._config.schema, list(names))

    async def queue_update(
        self, name: str, *, metadata: Mapping[str, object], tx: Transaction | None = None
    ) -> Queue:
        """Replace the metadata of a queue, and tell every client of it.

        Raises:
            ArgsError: the metadata is no JSON object, or too large for a notification, which holds
                7,999 bytes.
            NotFoundError: no client ever worked a queue of this name.
        """
        text = encode_metadata(metadata)
        payload = msgspec.json.encode(
            {"action": "metadata_changed", "metadata": msgspec.Raw(text.encode()), "queue": name}
        ).decode()
        if len(payload.encode()) > NOTIFICATION_SIZE_MAX:
            raise ArgsError(
                f"the metadata have {json_size(text):,} bytes as JSON, but every client is told of "
                f"them in one notification, which holds {NOTIFICATION_SIZE_MAX:,}: store the data "
                "elsewhere and give the queue its place"
            )
        async with self._transaction(tx) as connection:
            found = await queues.queue_update(connection, self._config.schema, name, text)
            if found is None:
                raise _no_queue(name)
            await queues.control_notify(connection, self._config.schema, payload)
        return found

    async def queue_pause(self, name: str, *, tx: Transaction | None = None) -> None:
        """Stop claiming from a queue, or with `*` from all, in every client. Running jobs go on.

        Raises:
            NotFoundError: no client ever worked a queue of this name.
        """
        await self._control(queues.queue_pause, "pause", name, tx)

    async def queue_resume(self, name: str, *, tx: Transaction | None = None) -> None:
        """Undo `queue_pause`.

        Raises:
            NotFoundError: no client ever worked a queue of this name.
        """
        await self._control(queues.queue_resume, "resume", name, tx)

    async def _control(
        self,
        call: Callable[[Transaction, str | None, str], Awaitable[list[str]]],
        action: str,
        name: str,
        tx: Transaction | None,
    ) -> None:
        async with self._transaction(tx) as connection:
            found = await call(connection, self._config.schema, name)
            if not found and name != "*":
                raise _no_queue(name)
            payload = msgspec.json.encode({"action": action, "queue": name}).decode()
            await queues.control_notify(connection, self._config.schema, payload)

    # -- periodic jobs

    async def periodic_pause(self, job_id: str, *, tx: Transaction | None = None) -> None:
        """Insert no job of this id, in whatever client leads, until it is resumed.

        Raises:
            NotFoundError: no leader has had a periodic job of this id.
            SchemaMissingError: the database lacks version 2 of line `riverpy`.
        """
        async with self._transaction(tx) as connection:
            await periodic.periodic_pause(connection, self._config.schema, job_id)

    async def periodic_resume(self, job_id: str, *, tx: Transaction | None = None) -> None:
        """Undo `periodic_pause`. Slots that passed meanwhile are not caught up with.

        Raises:
            NotFoundError, SchemaMissingError: as `periodic_pause`.
        """
        async with self._transaction(tx) as connection:
            await periodic.periodic_resume(connection, self._config.schema, job_id)

    async def periodic_run(self, job_id: str, *, tx: Transaction | None = None) -> None:
        """Ask the leader to insert one job of this id now, in addition to its schedule, paused or
        not.

        Raises:
            NotFoundError, SchemaMissingError: as `periodic_pause`.
        """
        async with self._transaction(tx) as connection:
            await periodic.periodic_run(connection, self._config.schema, job_id)


def _no_queue(name: str) -> NotFoundError:
    return NotFoundError(
        f"there is no queue {name!r}: a queue exists from when a client first works it"
    )
