"""JobScheduler: makes scheduled and retryable jobs available when they are due."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from riverpy._db.upkeep import job_due, job_lock_limit, job_schedule
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches
from riverpy._maintenance.mandate import TRANSACTION_LIMIT
from riverpy.drivers.asyncpg import LockNotAvailableError, PostgresError, describe, is_refusal

if TYPE_CHECKING:
    from riverpy._db.filters import QueueFilter
    from riverpy._db.upkeep import Scheduled
    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import Office

INTERVAL = 5.0
"""Seconds between two passes."""
AHEAD = timedelta(seconds=INTERVAL)
"""Jobs that are due before the next pass are made available too: workers take none before its
time."""
LOCK_LIMIT = timedelta(milliseconds=50)
"""How long a pass waits for a transaction that inserts a job with a key that a due one needs."""
REFUSED_MAX = 100
"""How many rows of a pass are told apart from the others of their batch; beyond that, batches with
such a row are left for the next pass as they are."""


class JobScheduler(MaintenanceService):
    """Moves jobs in batches; one that cannot be moved is found by halving its batch, and left."""

    name = "job scheduler"

    def __init__(self, office: Office) -> None:
        super().__init__(office)
        self._batches = Batches(office.timer, self.log)
        self._left: list[int] = []
        """Jobs that this pass could not move."""
        self._refused: list[int] = []
        """Those of them that failed their batch."""
        self._error: PostgresError | None = None
        self._is_refusing = False

    async def run_once(self, scope: StopScope) -> float:
        """Move all that are due.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        self._left, self._refused, self._error = [], [], None
        for within in (await self.office.scope()).filters():
            await self._batches.run(partial(self._batch, within))
        self._say_refused()
        return INTERVAL

    async def _batch(self, within: QueueFilter | None, limit: int) -> int:
        connection, bound = self.office.connection, TRANSACTION_LIMIT.total_seconds()
        self.office.mandate.expect_trusted()
        async with connection.use("finding due jobs", bound) as open_connection:
            ids = await job_due(
                open_connection,
                self.office.schema,
                within=within,
                ahead=AHEAD,
                skipped=self._left,
                limit=limit,
            )
        if ids:
            await self._move(ids)
        return len(ids)

    async def _move(self, ids: list[int]) -> None:
        try:
            moved = await self._move_together(ids)
        except PostgresError as error:
            if not is_refusal(error) and not isinstance(error, LockNotAvailableError):
                raise
            self._error = self._error or error
            await self._split(ids)
        else:
            self._left += moved.left
            if moved.discarded:
                self.log.info(
                    "jobs discarded that have the unique key of another", count=moved.discarded
                )

    async def _move_together(self, ids: list[int]) -> Scheduled:
        office = self.office
        async with office.mandate.transaction(
            office.connection, "making due jobs available"
        ) as connection:
            await job_lock_limit(connection, LOCK_LIMIT)
            return await job_schedule(connection, office.schema, ids=ids, ahead=AHEAD)

    async def _split(self, ids: list[int]) -> None:
        """Move what can be of a batch that failed."""
        if len(ids) == 1 or len(self._refused) >= REFUSED_MAX:
            self._refused += ids
            self._left += ids
            return
        middle = len(ids) // 2
        await self._move(ids[:middle])
        await self._move(ids[middle:])

    def _say_refused(self) -> None:
        """One warning as long as there are such jobs."""
        if self._error is not None:
            say = self.log.debug if self._is_refusing else self.log.warning
            say(
                "due jobs could not be made available, trying again",
                count=len(self._refused),
                job_ids=self._refused[:10],
                error=describe(self._error),
            )
        self._is_refusing = self._error is not None
