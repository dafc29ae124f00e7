"""RunQueueManager: adds, removes and resizes the queues of a client during one run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import UNSET

from riverpy._lifecycle import StopCause, run_despite_cancellation
from riverpy._log import get_logger
from riverpy._log_events import QUEUE_ADDED, QUEUE_REMOVED, QUEUE_RESIZED
from riverpy._postgres.jobs import job_is_any_available
from riverpy.context import running_job
from riverpy.errors import ClientStateError, QueueAlreadyAddedError, QueueNotFoundError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from msgspec import UnsetType

    from riverpy._lifecycle import ServiceGroup
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.skipped_rows import SkippedRow
    from riverpy._work.completer import Completer
    from riverpy._work.producer import Producer
    from riverpy._work.run_context import RunContext
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.config import QueueConfig

PRODUCER_STOP_TIMEOUT = 5.0
"""Seconds that the producer of a removed queue may take to stop. The stop of a producer includes a
running claim, which may take one second after the stop request."""


class RunQueueManager:
    """The queues of one run. `producers` maps the name of each queue to its producer. A
    removed queue stays in `producers` until its producer has stopped."""

    def __init__(
        self,
        context: RunContext,
        producers: dict[str, Producer],
        make_producer: Callable[[str, QueueConfig], Producer],
        running: RunningAttempts,
        completer: Completer,
        prepare: Callable[[str], Awaitable[None]],
        on_changed: Callable[[], None],
        on_removed: Callable[[str], None],
    ) -> None:
        """Create the producers of the client's queues.

        Args:
            context: the context of the run.
            producers: an empty dict, which this object fills.
            make_producer: creates the producer of a queue.
            running: the running attempts.
            completer: stores the results of the attempts.
            prepare: is awaited with the name of an added queue, before its jobs are claimed.
            on_changed: is called after queues or slots have changed.
            on_removed: is called with the name of a queue whose producer has stopped.
        """
        self._run_context = context
        self._configs, self._counters = context.client.queues, context.counters
        self._make_producer, self._running, self._completer = make_producer, running, completer
        self._prepare, self._on_changed, self._on_removed = prepare, on_changed, on_removed
        self.producers = producers
        for name, config in self._configs.items():
            producers[name] = make_producer(name, config)
        self._service_group: ServiceGroup | None = None
        """The service group in which the producers run; None: the run is starting or stopping."""
        self._changing_queue_names: set[str] = set()
        """The names of the queues that are being added or removed now."""
        self._draining_producers: set[Producer] = set()
        """The stopped producers whose jobs are still running, while `remove_queue` waits for these
        jobs."""
        self._undrained_producers: list[Producer] = []
        """The stopped producers whose jobs were still running when `remove_queue` ended."""
        self._has_run_ended = False
        self._log: Any = get_logger()

    @property
    def skipped_jobs(self) -> list[SkippedRow[int]]:
        """The jobs that claims skip, because an attempt to claim them failed."""
        return [
            job
            for producer in self.producers.values()
            for job in producer.unclaimable_jobs.skipped_jobs
        ]

    async def is_any_job_available(self, connection: Connection) -> bool:
        """Return whether a job can be claimed in one of the queues that are not paused."""
        claiming = [producer for producer in self.producers.values() if not producer.is_paused]
        return await job_is_any_available(
            connection,
            self._run_context.schema,
            queues=[producer.queue for producer in claiming],
            kinds=self._run_context.kinds_to_claim,
            skipped_ids=[
                job_id
                for producer in claiming
                for job_id in producer.unclaimable_jobs.skipped_job_ids
            ],
        )

    async def start_producers(self, group: ServiceGroup) -> None:
        """Start all producers in a service group."""
        for producer in list(self.producers.values()):
            await group.start(producer)

    def accept_queue_changes(self, group: ServiceGroup) -> None:
        """Allow `add_queue`, `remove_queue` and `resize_queue` from now on. Producers of added
        queues start in `group`."""
        self._service_group = group

    def refuse_queue_changes(self) -> None:
        """Make later calls of `add_queue`, `remove_queue` and `resize_queue` raise, because the run
        stops."""
        self._service_group = None

    def end_removal_waits(self) -> None:
        """Make all waiting calls of `remove_queue` return now, because the run has ended."""
        self._has_run_ended = True
        self._completer.batches_sent.set()
        for producer in self._draining_producers:
            producer.slot_freed.set()

    async def add_queue(self, name: str, config: QueueConfig) -> None:
        """Add a queue, and start to claim its jobs.

        Raises:
            QueueAlreadyAddedError: another call is adding or removing the queue. The caller must
                check whether the client works the queue already.
            ClientStateError: the run is starting or stopping.
            Exception: `prepare` failed.
        """
        self._get_service_group_or_raise()
        if name in self._changing_queue_names:
            raise QueueAlreadyAddedError(name, is_changing=True)
        self._changing_queue_names.add(name)
        self._counters.add_queue(name)
        producer = self.producers[name] = self._make_producer(name, config)
        is_started = False
        try:
            await self._prepare(name)
            group = self._get_service_group_or_raise()  # the run may have stopped during the wait
            self._configs[name] = config
            group.start_soon(producer)
            is_started = True
        finally:
            self._changing_queue_names.discard(name)
            if not is_started:
                self._remove_producer(name)
        self._on_changed()
        self._log.info(QUEUE_ADDED, queue=name, slots=config.max_workers)

    async def remove_queue(
        self, name: str, timeout: timedelta | UnsetType | None
    ) -> tuple[tuple[int, ...], int]:
        """Stop claiming jobs of a queue, and wait until its running jobs have ended and their
        results are stored. The wait takes at most `timeout`, a timedelta. UNSET means the soft stop
        timeout; None means no limit. The wait includes jobs that are still running after an earlier
        removal of this queue. Return the ids of the jobs that are still running, and the number of
        results that are not stored.

        Raises:
            QueueNotFoundError: the run does not work this queue.
            ClientStateError: the run is starting or stopping.
        """
        group = self._get_service_group_or_raise()
        if name not in self._configs:
            raise QueueNotFoundError(name)
        producer = self.producers[name]
        self._changing_queue_names.add(name)
        del self._configs[name]
        self._on_changed()
        try:
            await run_despite_cancellation(partial(self._stop_producer, group, producer))
            if timeout is UNSET:
                timeout = self._run_context.config.soft_stop_timeout
            with anyio.move_on_after(None if timeout is None else timeout.total_seconds()):
                await self._wait_for_unfinished_work(producer)
        finally:
            self._changing_queue_names.discard(name)
            left, unstored = self._find_unfinished_work(name)
            self._log.info(QUEUE_REMOVED, queue=name, running=len(left), unstored=unstored)
        return left, unstored

    def resize_queue(self, name: str, config: QueueConfig) -> None:
        """Change the number of slots of a queue.

        Raises:
            ClientStateError: the run is starting or stopping.
        """
        self._get_service_group_or_raise()
        before, self._configs[name] = self._configs[name].max_workers, config
        self.producers[name].set_slot_count(config.max_workers)
        self._on_changed()
        self._log.info(QUEUE_RESIZED, queue=name, slots=config.max_workers, before=before)

    def _get_service_group_or_raise(self) -> ServiceGroup:
        if self._service_group is None:
            raise ClientStateError(
                "the client is starting or stopping: change its queues while it works, or while it "
                "does not run"
            )
        return self._service_group

    async def _stop_producer(self, group: ServiceGroup, producer: Producer) -> None:
        """Stop a producer, and remove it from `producers`."""
        with anyio.move_on_after(PRODUCER_STOP_TIMEOUT):
            await group.stop_service(producer, StopCause.QUEUE_REMOVED)
        self._remove_producer(producer.queue)

    def _remove_producer(self, name: str) -> None:
        del self.producers[name]
        self._counters.remove_queue(name)
        self._on_removed(name)

    async def _wait_for_unfinished_work(self, producer: Producer) -> None:
        """Wait until the jobs of a stopped producer have ended and their results are stored. The
        wait includes jobs of earlier producers of the same queue. The wait ends early if the run
        ends. A job that removes its own queue does not wait for itself."""
        undrained = [one for one in self._undrained_producers if one.running_job_count]
        producers = [producer, *(one for one in undrained if one.queue == producer.queue)]
        for one in producers:
            one.slot_freed = producer.slot_freed
        self._undrained_producers = [*undrained, producer]
        caller = running_job.get()
        waiting_count = sum(
            attempt is caller and attempt.queue == producer.queue for attempt in self._running
        )
        self._draining_producers.add(producer)
        try:
            while (
                sum(one.running_job_count for one in producers) > waiting_count
                and not self._has_run_ended
            ):
                producer.slot_freed.clear()
                await producer.slot_freed.wait()
            while self._find_unfinished_work(producer.queue)[1] and not self._has_run_ended:
                self._completer.batches_sent.clear()
                await self._completer.batches_sent.wait()
        finally:
            self._draining_producers.discard(producer)

    def _find_unfinished_work(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return the ids of the running jobs of a queue, and the number of results of its jobs that
        are not stored yet."""
        running = tuple(sorted(attempt.id for attempt in self._running if attempt.queue == name))
        unstored = sum(attempt.queue == name for attempt in self._completer.unstored_attempts)
        return running, unstored
