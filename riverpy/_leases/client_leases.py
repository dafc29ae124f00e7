"""ClientLeases: the keeper of one client's leases, opened when the first is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import finish
from riverpy.stats import LeaseStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._leases.lease import Lease
    from riverpy._leases.manager import LeaseManagerService


class ClientLeases:
    """Holds the keeper from the first use until the client is closed."""

    def __init__(self, make: Callable[[list[Lease]], LeaseManagerService]) -> None:
        """Make it. `make` gets what earlier keepers have left."""
        self._make = make
        self._left: list[Lease] = []
        self._keeper: LeaseManagerService | None = None
        self._opening = anyio.Lock()

    async def open(self) -> LeaseManagerService:
        """The keeper, open.

        Raises:
            SchemaMissingError: line `riverpy` is not migrated; the text has the command.
            Exception: one of DATABASE_ERRORS.
        """
        async with self._opening:
            if self._keeper is None:
                keeper = self._make(self._left)
                await keeper.__aenter__()
                self._keeper = keeper
            return self._keeper

    async def close(self) -> None:
        """End every lease. A keeper that somebody opens just now is waited for, which has a bound,
        and closed too."""
        await finish(self._close)

    async def _close(self) -> None:
        async with self._opening:
            keeper, self._keeper = self._keeper, None
            if keeper is not None:
                await keeper.close()
                self._left = keeper.left

    def heard(self, payload: str) -> None:
        """A notification on the topic of leases."""
        if self._keeper is not None:
            self._keeper.heard(payload)

    def resync(self) -> None:
        """Notifications may have been missed."""
        if self._keeper is not None:
            self._keeper.resync()

    @property
    def stats(self) -> LeaseStats:
        """How they stand."""
        keeper = self._keeper
        if keeper is None:
            return LeaseStats()
        return LeaseStats(
            held=sum(lease.is_held for lease in keeper.kept),
            renewals=keeper.renewals,
            renewal_failures=keeper.renewal_failures,
            renewal_seconds=keeper.renewal_seconds,
        )
