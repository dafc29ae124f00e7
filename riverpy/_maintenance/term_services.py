"""Maintainer: all services of one term. A term has one of its own, so that nothing of an old term
can touch a newer one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import ServiceGroup
from riverpy._postgres.connection import close_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import MaintenanceService, TermContext


class Maintainer:
    """Starts the services, lets them begin together, and ends them together."""

    name = "maintainer"

    def __init__(self, context: TermContext, services: Sequence[MaintenanceService]) -> None:
        self._context = context
        self.services = services

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Run until stopped. A service that cannot start ends those that have, and its error is
        raised."""
        try:
            async with ServiceGroup(scope) as group:
                for service in self.services:
                    await group.start(service)
                self._context.up.set()
                task_status.started()
                await anyio.sleep_forever()
        finally:
            await close_all([self._context.connection, self._context.cleaning])
