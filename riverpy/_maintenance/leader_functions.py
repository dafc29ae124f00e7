"""LeaderFunctionService: runs a user's function while this client is the leader."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from riverpy._lifecycle import cancelled_once
from riverpy._log_events import LEADER_FUNCTION_ENDED
from riverpy._maintenance.base import MaintenanceService

if TYPE_CHECKING:
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy.singletons import LeaderFunction


class LeaderFunctionService(MaintenanceService):
    """Runs a user's function during a term: once if the function returns, and again after a delay
    if the function raises."""

    def __init__(self, context: TermContext, function: LeaderFunction) -> None:
        self.name = f"leader function {function.name}"
        super().__init__(context)
        self._function = function

    async def run_once(self, scope: StopScope) -> float:
        """Run the function to its end. Raise what the function raises."""
        await cancelled_once(self.name, lambda: self._function.fn(self.context.fence))
        self.log.info(LEADER_FUNCTION_ENDED)
        return math.inf
