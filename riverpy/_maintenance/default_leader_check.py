"""DefaultLeaderCheck: ends the term of the schema lease when `default` gets or loses a leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._maintenance.base import MaintenanceService
from riverpy._postgres.domains import default_leader

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope


class DefaultLeaderCheck(MaintenanceService):
    """Reads the leader of `default` at the interval at which leases are renewed."""

    name = "default leader check"

    def __init__(
        self, context: TermContext, resign: Callable[[str], object], *, has_foreign_leader: bool
    ) -> None:
        """Create the check.

        Args:
            context: what the services of the term share.
            resign: ends the term of the schema lease. Its argument is the reason.
            has_foreign_leader: whether a client of River in Go was the leader of `default` when
                the term began. If False, `default` had no leader.
        """
        super().__init__(context)
        self._resign, self._has_foreign_leader = resign, has_foreign_leader

    async def run_once(self, scope: StopScope) -> float:
        """Read the leader of `default`. End the term if the leader has changed."""
        async with self.read_connection("reading the leader of `default`") as connection:
            lead = await default_leader(connection, self.schema)
        if lead.is_registered or lead.is_led is not self._has_foreign_leader:
            self._resign("the leader of `default` has changed")
        return self.context.config.elect_interval.total_seconds()
