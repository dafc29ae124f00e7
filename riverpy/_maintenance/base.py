"""What every maintenance service is: a pass over the tables, again and again while the term
lasts."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._clock import Backoff
from riverpy._leading.queue_scope import everything
from riverpy._lifecycle import TestSignal
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import MAINTENANCE_RUN_FAILED, MAINTENANCE_RUN_SUCCEEDED_AGAIN
from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._leading.queue_scope import Scope
    from riverpy._leading.term_fence import TermFence
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.set_aside import SetAsideRow
    from riverpy.config import Config
    from riverpy.worker import Workers

STAGGER = 1.0
"""Seconds within which the services of a term begin, each at a moment of its own."""
RETRY_FIRST = timedelta(seconds=1)
RETRY_MOST = timedelta(seconds=8)
"""The delay after a pass that failed doubles up to this; it never gives up."""


@dataclass(frozen=True, kw_only=True)
class TermContext:
    """What the services of one term share."""

    fence: TermFence
    config: Config
    workers: Workers
    connection: DedicatedConnection
    """For statements that are short."""
    cleaning: DedicatedConnection
    """For statements that may take their whole limit."""
    timer: Timer
    connect_direct: Callable[[], Awaitable[Connection]] | None = None
    """Makes a session that leads past any pooler in transaction mode; None: there is no way."""
    scope: Callable[[], Awaitable[Scope]] = everything
    """Which queues are maintained; asked at each pass, as queues come and go meanwhile.

    Raises:
        Exception: one of DATABASE_ERRORS; the pass is tried again soon.
    """
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all services of the term have started: no pass begins before."""

    @property
    def schema(self) -> str | None:
        """The schema of River's tables."""
        return self.config.schema


class MaintenanceService(ABC):
    """One service of one term."""

    name: str

    def __init__(self, context: TermContext) -> None:
        self.context = context
        self.log = get_logger(service=self.name)
        self._stirred = asyncio.Event()
        self._backoff = Backoff(RETRY_FIRST, RETRY_MOST)
        self._run_failures = RepeatedFailureLog(self.log)
        self.reports: list[Callable[[], list[SetAsideRow]]] = []
        """Each lists the rows that one of the service's statements has set aside."""
        self.ran = TestSignal(f"{type(self).__name__}.ran")
        """Emitted after each pass that succeeded."""

    async def prepare(self) -> None:  # noqa: B027 (most services need nothing)
        """What must succeed before the term's maintenance is up. It is done once; raising makes the
        start fail. Default nothing."""

    @abstractmethod
    async def run_once(self, scope: StopScope) -> float:
        """One pass; returns the seconds until the next.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS; the pass is tried again soon.
        """

    def wake(self) -> None:
        """Begin the next pass now."""
        self._stirred.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Start, wait until the other services have, and pass until stopped."""
        await self.prepare()
        task_status.started()
        await self.context.up.wait()
        await self.context.timer.sleep(random.uniform(0, STAGGER))  # noqa: S311 (no secret)
        while True:
            self._stirred.clear()
            delay = await self._pass(scope)
            await self.context.timer.wait(self._stirred, delay)

    async def _pass(self, scope: StopScope) -> float:
        try:
            self.context.fence.expect_valid()  # a process that was frozen begins nothing
            delay = await self.run_once(scope)
        except FencedOutError:  # the elector knows too, and ends the term
            return RETRY_FIRST.total_seconds()
        except Exception as error:
            self._log_failure(error)
            return self._backoff.next()
        self._run_failures.recovered(MAINTENANCE_RUN_SUCCEEDED_AGAIN)
        self._backoff.reset()
        self.ran.emit()
        return delay

    def _log_failure(self, error: Exception) -> None:
        is_outage = isinstance(error, DATABASE_ERRORS)
        self._run_failures.failed(
            MAINTENANCE_RUN_FAILED,
            level="warning" if is_outage else "error",
            cause="outage" if is_outage else type(error).__name__,
            is_known=is_outage and self.context.connection.is_outage_logged,
            exc_info=None if is_outage else error,
            error=describe(error),
        )
