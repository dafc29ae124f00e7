"""ClientLeaseEngine: opens the lease engine of one client when it is first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import run_despite_cancellation
from riverpy.stats import LeaseStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._leases.engine import LeaseEngine
    from riverpy._leases.lease import Lease
    from riverpy._postgres.lease_reports import ReportedLag


class ClientLeaseEngine:
    """Keeps the lease engine of one client. The first call of `open` creates the engine, `close`
    closes it."""

    def __init__(self, make_engine: Callable[[list[Lease]], LeaseEngine]) -> None:
        """Create the object without an engine. `open` calls `make_engine` to create an engine.

        The argument of `make_engine` is a list of leases that this client held earlier. These
        leases have ended, but the work under them may still run."""
        self._make_engine = make_engine
        self._leases_with_running_work: list[Lease] = []
        self._engine: LeaseEngine | None = None
        self._engine_lock = anyio.Lock()

    async def open(self) -> LeaseEngine:
        """Return the open engine. The first call creates and opens it.

        Raises:
            SchemaMissingError: the migration line `riverpy` is not applied. The error text contains
                the command that applies it.
            Exception: one of DATABASE_ERRORS.
        """
        async with self._engine_lock:
            if self._engine is None:
                engine = self._make_engine(self._leases_with_running_work)
                await engine.__aenter__()
                self._engine = engine
            return self._engine

    async def close(self) -> None:
        """Close the engine, and end all of its leases. If another task is opening the engine, wait
        for that first."""
        await run_despite_cancellation(self._close_engine)

    async def _close_engine(self) -> None:
        async with self._engine_lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()
                self._leases_with_running_work = engine.leases_with_running_work

    def receive_notification(self, payload: str) -> None:
        """Handle a notification on the topic `riverpy_lease`."""
        if self._engine is not None:
            self._engine.receive_notification(payload)

    def wake_all_waiting_callers(self) -> None:
        """Try now to acquire each lease that a caller waits for, because notifications may have
        been lost."""
        if self._engine is not None:
            self._engine.wake_all_waiting_callers()

    @property
    def standby_lease_names(self) -> list[str]:
        """The names of the leases for which this client stands by. Empty without an engine."""
        return [] if self._engine is None else self._engine.standby_lease_names

    @property
    def reported_lags(self) -> dict[str, ReportedLag]:
        """The last lag report of each held lease (`LeaseEngine.reported_lags`). Empty without an
        engine."""
        return {} if self._engine is None else self._engine.reported_lags

    @property
    def stats(self) -> LeaseStats:
        """The counts of held leases and of renewals, and the duration of the last renewal."""
        return LeaseStats() if self._engine is None else self._engine.renewer.stats
