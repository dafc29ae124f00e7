"""WorkerSupervisor: runs several worker processes, and stops them together.

The first process starts alone. If it ends before its client has started to work jobs, the
supervisor does not start the others, and ends with the same exit code. So a wrong setting is
reported only once. Otherwise the supervisor starts the other processes, and replaces each process
that ends.

The supervisor has no connection to the database and does not import the user's code.
"""

from __future__ import annotations

import signal
from contextlib import nullcontext
from typing import TYPE_CHECKING

import anyio

from riverpy._tools.processes.health_pages import SupervisorHealthServer
from riverpy._tools.processes.orphans import collect_orphan_exit_codes
from riverpy._tools.processes.slot import ProcessSlot, SharedProcessSlotState

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from riverpy._tools.health.http import Address
    from riverpy._tools.health.systemd import SystemdNotifier
    from riverpy._tools.processes.slot import RestartRules
    from riverpy._tools.processes.worker_process import WorkerStartCommand

KILLED_PROCESSES_TIMEOUT = 5.0
"""How long to wait until killed processes have ended, in seconds."""


class WorkerSupervisor:
    """Runs worker processes until a signal stops them.

    Args:
        command: how to start a worker.
        count: the number of workers.
        rules: what to do when a worker ends.
        unclean_exit_code: the exit code of the supervisor if a worker did not stop cleanly.
        health: the address of the health server; None: the supervisor has no health server.
        systemd: notifies the service manager.
    """

    def __init__(
        self,
        command: WorkerStartCommand,
        count: int,
        rules: RestartRules,
        *,
        unclean_exit_code: int,
        health: Address | None,
        systemd: SystemdNotifier,
    ) -> None:
        self._shared = SharedProcessSlotState()
        self._unclean_exit_code = unclean_exit_code
        self._slots = [
            ProcessSlot(number, command, rules, self._shared) for number in range(1, count + 1)
        ]
        self._health = None if health is None else SupervisorHealthServer(health, self._slots)
        self._systemd = systemd
        self._forced_exit_code: int | None = None
        self._forced_exit_event = anyio.Event()

    def request_stop(self) -> None:
        """Start a soft stop. If a stop has started already, do nothing. Call this in the event
        loop."""
        self._shared.stop_requested.set()

    async def run(self) -> int:
        """Run the workers until all have ended. Return the exit code.

        Raises:
            OSError: the health server cannot listen on its address. No worker was started.
        """
        async with (
            self._health.serve() if self._health is not None else nullcontext(),
            self._systemd.run_watchdog_pings(lambda: True),  # each slot checks its own worker
            anyio.create_task_group() as tasks,
        ):
            await tasks.start(self._handle_stop_signals)
            tasks.start_soon(self._notify_systemd_when_ready)
            tasks.start_soon(self._kill_all_after_third_signal, tasks.cancel_scope)
            tasks.start_soon(collect_orphan_exit_codes, self._list_process_ids)
            await self._run_process_slots()
            tasks.cancel_scope.cancel()
        return self._choose_exit_code()

    async def _run_process_slots(self) -> None:
        first, *others = self._slots
        async with anyio.create_task_group() as tasks:

            async def run_first_slot() -> None:
                """Run the first slot. If its first process ends before its client has started to
                work jobs, start no other slots."""
                await first.run(must_work_once=True)
                if not first.has_worked_event.is_set():
                    tasks.cancel_scope.cancel()

            tasks.start_soon(run_first_slot)
            await first.has_worked_event.wait()
            for slot in others:
                tasks.start_soon(slot.run)

    def _choose_exit_code(self) -> int:
        if self._forced_exit_code is not None:
            return self._forced_exit_code
        first = self._slots[0]
        if not first.has_worked_event.is_set():
            return first.exit_code or 0
        return 0 if all(slot.has_ended_cleanly for slot in self._slots) else self._unclean_exit_code

    async def _notify_systemd_when_ready(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._notify_systemd_when_stopping)
            for slot in self._slots:
                await slot.has_worked_event.wait()
            self._systemd.notify(READY=1, STATUS=f"{len(self._slots)} worker processes work")

    async def _notify_systemd_when_stopping(self) -> None:
        await self._shared.stop_requested.wait()
        self._systemd.notify(STOPPING=1, STATUS="waiting for running jobs")

    async def _handle_stop_signals(self, *, task_status: TaskStatus[None]) -> None:
        # Not a module constant: Windows lacks two of these signals, so the import would fail.
        stop_signals = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under `nohup`
            stop_signals.append(signal.SIGHUP)
        with anyio.open_signal_receiver(*stop_signals) as signals:
            task_status.started()
            async for number in signals:
                if not self._shared.stop_requested.is_set():
                    self._shared.stop_requested.set()
                elif number == signal.SIGHUP:
                    pass  # a terminal that closes can send SIGHUP twice
                elif not self._shared.hard_stop_requested.is_set():
                    self._shared.hard_stop_requested.set()
                else:
                    self._forced_exit_code = 128 + number
                    self._forced_exit_event.set()

    def _list_process_ids(self) -> set[int]:
        return {slot.process.pid for slot in self._slots if slot.process is not None}

    async def _kill_all_after_third_signal(self, scope: anyio.CancelScope) -> None:
        """Kill all workers when a third signal arrives, then cancel `scope`."""
        await self._forced_exit_event.wait()
        for slot in self._slots:
            slot.kill("a third signal arrived")
        await anyio.sleep(KILLED_PROCESSES_TIMEOUT)
        scope.cancel()
