"""Runs several worker processes and their supervisor, for `riverpy worker --processes`."""

from __future__ import annotations

import asyncio
import os
import sys
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import click

from riverpy._tools.health.systemd import SystemdNotifier
from riverpy._tools.processes.slot import RestartRules
from riverpy._tools.processes.supervisor import WorkerSupervisor
from riverpy._tools.processes.worker_process import WorkerStartCommand
from riverpy.cli._run import (
    COMMAND_ARGUMENTS_KEY,
    EXIT_LIMIT_REACHED,
    EXIT_UNCLEAN_STOP,
    EXIT_USAGE_ERROR,
    MAIN_MODULE_KEY,
    CommandError,
    translate_to_command_errors,
)

if TYPE_CHECKING:
    from riverpy._tools.health.http import Address
    from riverpy.cli._log_stream import LogStream

_START_SCRIPT = Path(__file__).with_name("_process_start.py")
_SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""The environment variables for notifications to systemd. Only the supervisor uses them; they are
removed from the environment of the workers."""


def run_worker_processes(
    count: int, stream: LogStream, *, health: Address | None, should_drain: bool
) -> int:
    """Run `count` worker processes with the arguments of this command until all have ended. Return
    the exit code.

    Args:
        count: the number of worker processes.
        stream: the log stream of this process. If its reader ends, all workers stop.
        health: the address of the health server; None: there is no health server.
        should_drain: whether a worker stops when the queues are empty.

    Raises:
        CommandError: the operating system is Windows.
    """
    if sys.platform == "win32":
        raise CommandError(
            "--processes runs on Linux and macOS: start several commands instead",
            exit_code=EXIT_USAGE_ERROR,
        )
    meta = click.get_current_context().find_root().meta
    command = WorkerStartCommand(
        program=[get_executable(), "-P", str(_START_SCRIPT)],
        arguments=(meta.get(MAIN_MODULE_KEY, "riverpy.cli"), *meta[COMMAND_ARGUMENTS_KEY]),
        environ={
            name: value for name, value in os.environ.items() if name not in _SYSTEMD_VARIABLES
        },
        python_path=sys.path,
    )
    systemd = SystemdNotifier(os.environ)
    supervisor = WorkerSupervisor(
        command,
        count,
        RestartRules(
            limit_exit_code=EXIT_LIMIT_REACHED,
            should_drain=should_drain,
            watchdog_timeout=systemd.watchdog_timeout,
        ),
        unclean_exit_code=EXIT_UNCLEAN_STOP,
        health=health,
        systemd=systemd,
    )
    with translate_to_command_errors():
        return anyio.run(_run_supervisor, supervisor, stream)  # not uvloop, which needs more memory


async def _run_supervisor(supervisor: WorkerSupervisor, stream: LogStream) -> int:
    loop = asyncio.get_running_loop()

    def stop() -> None:  # any thread may call this
        loop.call_soon_threadsafe(supervisor.request_stop)

    stream.on_reader_ended = stop
    try:
        return await supervisor.run()
    finally:
        stream.on_reader_ended = None
