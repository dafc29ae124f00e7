"""TermContext: the objects that the maintenance services of one term share. A term is the time of
one client as leader."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from riverpy._clock import Timer
    from riverpy._leading.queue_scope import QueueScope
    from riverpy._leading.term_fence import TermFence
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.fleet import EndedJob
    from riverpy.config import Config
    from riverpy.worker import Workers


class EndedJobPublisher(Protocol):
    """Sends events about jobs that a leader has ended. The receivers are the clients that follow
    these events."""

    @property
    def has_followers(self) -> bool:
        """Whether any client follows the events."""
        ...

    def publish_jobs_ended_by_leader(
        self, jobs: Iterable[EndedJob], state_by_id: Mapping[int, str]
    ) -> None:
        """Send the events of these jobs. `state_by_id` has the new state of each job."""

    def count_dropped_events(self, count: int) -> None:
        """Add `count` to the number of events that were dropped instead of sent."""


@dataclass(frozen=True, kw_only=True)
class TermContext:
    """The objects that the maintenance services of one term (a client's time as leader) share.
    `fence` opens transactions that commit only during the term."""

    fence: TermFence
    config: Config
    workers: Workers
    connection: DedicatedConnection
    """The connection for short statements."""
    long_statement_connection: DedicatedConnection
    """The connection for statements that may take long, up to their timeout."""
    timer: Timer
    open_direct_connection: Callable[[], Awaitable[Connection]] | None
    """Opens a connection that bypasses a pooler in transaction mode. None: that is not possible."""
    read_queue_scope: Callable[[], Awaitable[QueueScope]]
    """Returns the queues to maintain. Each run of a service calls this function, because queues may
    get another owner.

    Raises:
        Exception: one of DATABASE_ERRORS; the service soon repeats the run.
    """
    ended_job_publisher: EndedJobPublisher | None = None
    """Sends events about jobs that a service has ended. None: no client can follow these events."""
    all_services_started: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set when all services of the term have started. No service does its work
    before that."""

    @property
    def schema(self) -> str | None:
        """The schema of River's tables."""
        return self.config.schema
