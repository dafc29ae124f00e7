"""A service that ends the term of the schema lead when `default` gets or loses a leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._maintenance.base import MaintenanceService
from riverpy._postgres.domains import default_leader

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import TermContext

STATEMENT_TIMEOUT = 5.0


class DefaultLeaderCheck(MaintenanceService):
    """Looks who leads `default`, as often as a lease is renewed."""

    name = "default watch"

    def __init__(
        self, context: TermContext, give_way: Callable[[str], None], *, is_foreign_led: bool
    ) -> None:
        """Make it.

        Args:
            context: of the term.
            give_way: ends the term; called with the reason.
            is_foreign_led: whether a client that is not riverpy's led `default` when the term
                began, else nobody did.
        """
        super().__init__(context)
        self._give_way, self._is_foreign_led = give_way, is_foreign_led

    async def run_once(self, scope: StopScope) -> float:
        """Look once."""
        purpose = "looking who leads `default`"
        async with self.context.connection.use(purpose, STATEMENT_TIMEOUT) as connection:
            lead = await default_leader(connection, self.context.schema)
        if lead.is_registered or lead.is_led is not self._is_foreign_led:
            self._give_way("who leads `default` has changed")
        return self.context.config.elect_interval.total_seconds()
