"""PeriodicJobCalls: the calls on one periodic job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._calls.base import ClientCalls
from riverpy._postgres import periodic

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction


class PeriodicJobCalls(ClientCalls):
    """The calls on one periodic job."""

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
