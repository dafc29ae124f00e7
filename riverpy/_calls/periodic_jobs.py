"""PeriodicJobMethods: the methods of a client that pause, resume or run a periodic job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._calls.base import ClientMethods
from riverpy._postgres import periodic

if TYPE_CHECKING:
    from riverpy._postgres.sessions.protocols import CallerTransaction


class PeriodicJobMethods(ClientMethods):
    """The methods of a client that pause, resume or run a periodic job."""

    async def periodic_pause(self, job_id: str, *, tx: CallerTransaction | None = None) -> None:
        """Stop inserting jobs of this periodic job until `periodic_resume` is called. The pause
        continues when another client becomes leader.

        Raises:
            NotFoundError: no leader has registered a periodic job with this id.
            SchemaMissingError: the database lacks migration 2 of the migration line `riverpy`.
        """
        async with self._transaction(tx) as connection:
            await periodic.periodic_pause(connection, self._config.schema, job_id)

    async def periodic_resume(self, job_id: str, *, tx: CallerTransaction | None = None) -> None:
        """Resume a paused periodic job. Runs that were scheduled during the pause are skipped.

        Raises:
            NotFoundError, SchemaMissingError: as `periodic_pause`.
        """
        async with self._transaction(tx) as connection:
            await periodic.periodic_resume(connection, self._config.schema, job_id)

    async def periodic_run(self, job_id: str, *, tx: CallerTransaction | None = None) -> None:
        """Request that the leader inserts one job of this periodic job now, in addition to the
        schedule. This also works while the periodic job is paused.

        Raises:
            NotFoundError, SchemaMissingError: as `periodic_pause`.
        """
        async with self._transaction(tx) as connection:
            await periodic.periodic_request_run(connection, self._config.schema, job_id)
