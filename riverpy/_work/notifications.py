"""NotificationRouter: routes notifications about jobs and queues to the parts of one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._postgres.domains import OWNERS_ACTION
from riverpy._postgres.job_maintenance import DUE_ACTION
from riverpy._postgres.notifier import decode_message
from riverpy._postgres.periodic import CHANGED_ACTION, EVENT_TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._postgres.notifier import Notifier
    from riverpy._work.leader_setup import LeaderSetup
    from riverpy._work.producer import Producer
    from riverpy._work.reconciler import Reconciler
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.periodic import PeriodicJobs


class NotificationRouter:
    """Routes notifications. Unknown and invalid notifications are ignored."""

    def __init__(
        self,
        producers: Mapping[str, Producer],
        running: RunningAttempts,
        reconciler: Reconciler,
        periodic_jobs: PeriodicJobs,
        leader_setup: LeaderSetup | None,
    ) -> None:
        self._producers, self._running, self._reconciler = producers, running, reconciler
        self._periodic_jobs, self._leader_setup = periodic_jobs, leader_setup

    def subscribe(self, notifier: Notifier) -> None:
        """Subscribe to the notifications about jobs, queues and maintenance."""
        notifier.subscribe("river_insert", self._receive_insert)
        notifier.subscribe("river_control", self._receive_control)
        notifier.subscribe(EVENT_TOPIC, self._receive_event)

    def _receive_insert(self, payload: str) -> None:
        message = decode_message(payload)
        if message is not None and message.queue in self._producers:
            self._producers[message.queue].notify()

    def _receive_control(self, payload: str) -> None:
        message = decode_message(payload)
        if message is None:
            return
        match message.action:
            case "cancel" if message.job_id:
                self._running.cancel(message.job_id, message.queue)
                if message.queue in self._producers:
                    self._producers[message.queue].cancel(message.job_id)
            case "pause" | "resume":
                self._reconciler.set_paused(message.queue, paused=message.action == "pause")
            case _:  # metadata_changed and actions of later versions
                pass

    def _receive_event(self, payload: str) -> None:
        message = decode_message(payload)
        if message is None:
            return
        if message.action == CHANGED_ACTION:
            self._periodic_jobs.wake()
        elif message.action == OWNERS_ACTION and self._leader_setup is not None:
            self._leader_setup.owners_changed()
        elif message.action == DUE_ACTION and message.queue in self._producers:
            for seconds in message.seconds:
                self._producers[message.queue].expect_due_job(seconds)
