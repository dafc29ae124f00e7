"""The supervisor of `riverpy dev`: runs a worker process and the dashboard, and restarts the worker
when code changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from pathlib import Path

    from anyio.abc import TaskStatus
    from watchfiles import Change

HARD_STOP_TIMEOUT = 2.0
"""If the worker or the dashboard still runs this many seconds after the second signal, it is
killed."""
DASHBOARD_STOP_TIMEOUT = 10.0
"""If the dashboard still runs this many seconds after the request to stop, it is killed. The
dashboard waits up to 5 seconds for open HTTP requests before it ends."""
_SETTINGS_FILES = ("/pyproject.toml", "/riverpy.toml")
_IGNORED_DIRECTORIES = ("site-packages", "venv")
"""Changes in directories with these names are ignored. watchfiles ignores more names by default."""
_CHANGE_QUIET_PERIOD_MS = 100
"""watchfiles reports changes when no file has changed for this time, in milliseconds."""
_CHANGE_REPORT_DELAY_MAX_MS = 1_000
"""The longest time until watchfiles reports a change, in milliseconds."""


class CommandProcess:
    """A process that runs `riverpy worker` or `riverpy web`. It has its own POSIX session, so
    that Ctrl-C in the terminal reaches only the supervisor.

    Args:
        name: the name of the process in messages to the user.
        arguments, environ, stop_timeout, print_note: as in `DevSupervisor`.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        stop_timeout: float,
        print_note: Callable[[str], None],
    ) -> None:
        self._name, self._stop_timeout, self._print_note = name, stop_timeout, print_note
        self.ended_event = anyio.Event()
        reader, self._pipe_writer = os.pipe()
        os.set_inheritable(reader, True)
        self._process = subprocess.Popen(  # noqa: S603 (a program of this package)
            [
                sys.executable,
                "-m",
                "riverpy._tools.dev.worker",
                str(reader),
                str(stop_timeout),
                *arguments,
            ],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            close_fds=False,  # the child inherits the lock that keeps the embedded server running
            start_new_session=True,
        )
        os.close(reader)

    async def wait_until_ended(self) -> None:
        """Wait until the process ends. Then kill the processes that its jobs started and that still
        run."""
        try:
            await anyio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        finally:
            self._kill_process_group()
            os.close(self._pipe_writer)
            self.ended_event.set()

    @property
    def exit_code(self) -> int:
        """The exit code of the ended process. If signal N killed the process, this is 128 + N."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    async def stop(self, hard_stop_requested: anyio.Event) -> None:
        """Request that the process stops, and wait until it ends. Kill the process if it does not
        end within the stop timeout.

        When `hard_stop_requested` is set, request the stop a second time: a worker then cancels its
        jobs. Kill the process if it does not end within `HARD_STOP_TIMEOUT` after that.
        """
        self._process.terminate()
        with anyio.move_on_after(self._stop_timeout):
            await wait_for_any_event(self.ended_event, hard_stop_requested)
        if hard_stop_requested.is_set() and not self.ended_event.is_set():
            self._process.terminate()
            with anyio.move_on_after(HARD_STOP_TIMEOUT):
                await self.ended_event.wait()
        if not self.ended_event.is_set():
            self._print_note(f"riverpy dev: the {self._name} did not end in time and is killed")
            self._kill_process_group()
            await self.ended_event.wait()

    def _kill_process_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class DevSupervisor:
    """Runs a worker and the dashboard until a signal arrives. Restarts the worker when a file
    changes.

    Args:
        arguments: the arguments of `riverpy` for the worker.
        web_arguments: the arguments of `riverpy` for the dashboard. None: no dashboard.
        environ: the environment of both processes.
        directory: the directory to watch. None: the supervisor ends when the worker ends.
        stop_timeout: the timeout of a stop, in seconds. When it expires, the worker is killed.
        print_note: prints a line for the user.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        web_arguments: Sequence[str] | None,
        environ: Mapping[str, str],
        *,
        directory: Path | None,
        stop_timeout: float,
        print_note: Callable[[str], None],
    ) -> None:
        self._arguments, self._web_arguments, self._environ = arguments, web_arguments, environ
        self._print_note = print_note
        self._directory, self._stop_timeout = directory, stop_timeout
        self._stop_requested, self._hard_stop_requested = anyio.Event(), anyio.Event()
        self._files_changed = anyio.Event()

    async def run(self) -> int:
        """Run workers until a stop is requested. Return the exit code of the last worker."""
        code = 0
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._handle_stop_signals)
            if self._directory is not None:
                tasks.start_soon(self._watch_file_changes, self._directory)
            async with self._run_dashboard():
                while not self._stop_requested.is_set():
                    self._files_changed = anyio.Event()
                    code = await self._run_worker()
                    if self._directory is None:
                        break
            tasks.cancel_scope.cancel()
        return code

    @asynccontextmanager
    async def _run_dashboard(self) -> AsyncGenerator[None]:
        """Run the dashboard during the `async with` block. A changed file does not restart it."""
        if self._web_arguments is None:
            yield
            return
        dashboard = CommandProcess(
            "dashboard",
            self._web_arguments,
            self._environ,
            DASHBOARD_STOP_TIMEOUT,
            self._print_note,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._report_dashboard_end, dashboard)
            try:
                yield
            finally:
                self._stop_requested.set()
                with anyio.CancelScope(shield=True):  # safe: `stop` has a timeout
                    if not dashboard.ended_event.is_set():
                        await dashboard.stop(self._hard_stop_requested)

    async def _report_dashboard_end(self, dashboard: CommandProcess) -> None:
        await dashboard.wait_until_ended()
        if not self._stop_requested.is_set():
            self._print_note(
                f"riverpy dev: the dashboard ended with code {dashboard.exit_code}. The worker "
                "continues"
            )

    async def _run_worker(self) -> int:
        """Run one worker until it ends, a file changes or a stop is requested. If the worker ends
        by itself and a directory is watched, wait for a changed file or a stop. Return the exit
        code of the worker."""
        worker = CommandProcess(
            "worker", self._arguments, self._environ, self._stop_timeout, self._print_note
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.wait_until_ended)
            await wait_for_any_event(worker.ended_event, self._files_changed, self._stop_requested)
            if not worker.ended_event.is_set():
                await worker.stop(self._hard_stop_requested)
            elif self._directory is not None:
                self._print_note(
                    f"riverpy dev: the worker ended with code {worker.exit_code}. "
                    "It starts again when a file changes"
                )
                await wait_for_any_event(self._files_changed, self._stop_requested)
        return worker.exit_code

    async def _handle_stop_signals(self, *, task_status: TaskStatus[None]) -> None:
        # This tuple is no module constant, because Windows lacks two of these signals.
        stop_signals = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
        with anyio.open_signal_receiver(*stop_signals) as signals:
            task_status.started()
            async for _ in signals:
                if self._stop_requested.is_set():
                    self._hard_stop_requested.set()
                else:
                    self._print_note(
                        "riverpy dev: stopping. A second signal cancels the running jobs"
                    )
                    self._stop_requested.set()

    async def _watch_file_changes(self, directory: Path) -> None:
        from watchfiles import PythonFilter, awatch  # pyright: ignore[reportUnknownVariableType] (its stop_event)

        is_ours = PythonFilter(extra_extensions=_SETTINGS_FILES)
        is_ours.ignore_dirs = (*PythonFilter.ignore_dirs, *_IGNORED_DIRECTORIES)
        async for changes in awatch(
            directory,
            watch_filter=is_ours,
            debounce=_CHANGE_REPORT_DELAY_MAX_MS,
            step=_CHANGE_QUIET_PERIOD_MS,
        ):
            if not self._stop_requested.is_set():
                self._print_note(
                    f"riverpy dev: {_describe_file_changes(changes, directory)} changed, restarting"
                )
                self._files_changed.set()


async def wait_for_any_event(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def wait_for(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait_for, event)


def _describe_file_changes(changes: set[tuple[Change, str]], directory: Path) -> str:
    names = sorted({os.path.relpath(path, directory) for _, path in changes})
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
