"""The supervisor of `riverpy dev`: one worker process at a time, a new one when code changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anyio.abc import TaskStatus
    from watchfiles import Change

URGENT_LIMIT = 2.0
"""Seconds that a worker has from the second signal to its end."""
_SETTINGS_FILES = frozenset({"pyproject.toml", "riverpy.toml"})
_IGNORED = ("site-packages", "venv")
"""Directories, beside those that watchfiles ignores by itself."""
_QUIET = 100
"""Milliseconds without a further change after which a group of changes counts as complete."""
_GROUP_MOST = 1_000
"""Milliseconds that a group of changes may take."""


class WorkerProcess:
    """A `riverpy worker` in a session of its own: no Ctrl-C of the terminal reaches it but by us.

    Args:
        arguments: of `riverpy`.
        environ: of the process.
        limit: seconds from the request to stop to the end.
        print_note: prints a line for the user.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        limit: float,
        print_note: Callable[[str], None],
    ) -> None:
        self._limit, self._print_note = limit, print_note
        self.ended = anyio.Event()
        reader, self._writer = os.pipe()
        os.set_inheritable(reader, True)
        self._process = subprocess.Popen(  # noqa: S603 (our own program)
            [
                sys.executable,
                "-m",
                "riverpy._tools.dev.worker",
                str(reader),
                str(limit),
                *arguments,
            ],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            close_fds=False,  # what is inheritable holds the embedded server
            start_new_session=True,
        )
        os.close(reader)

    async def watch(self) -> None:
        """Wait for its end, and end what its jobs have left."""
        try:
            await anyio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        finally:
            self._kill()
            os.close(self._writer)
            self.ended.set()

    @property
    def exit_code(self) -> int:
        """Of the process, which has ended; 128 + the number of the signal that killed it."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    async def stop(self, urgent: anyio.Event) -> None:
        """Let running jobs end; from `urgent` on cancel them, and do not wait for long."""
        self._terminate()
        with anyio.move_on_after(self._limit):
            await first_of(self.ended, urgent)
        if urgent.is_set() and not self.ended.is_set():
            self._terminate()
            with anyio.move_on_after(URGENT_LIMIT):
                await self.ended.wait()
        if not self.ended.is_set():
            self._print_note("riverpy dev: the worker did not end in time, killing it")
            self._kill()
            await self.ended.wait()

    def _terminate(self) -> None:
        self._process.terminate()

    def _kill(self) -> None:
        """It and all processes of its session that did not leave its group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Supervisor:
    """Keeps a worker running until a signal comes.

    Args:
        arguments: of `riverpy`.
        environ: of the worker process.
        directory: where to watch for changes; None: a worker that ends ends it all.
        limit: seconds from the request to stop to a worker's end.
        print_note: prints a line for the user.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        directory: Path | None,
        limit: float,
        print_note: Callable[[str], None],
    ) -> None:
        self._arguments, self._environ = arguments, environ
        self._print_note = print_note
        self._directory, self._limit = directory, limit
        self._stopping, self._urgent = anyio.Event(), anyio.Event()
        self._changed = anyio.Event()

    async def run(self) -> int:
        """Supervise, and return the last worker's exit code."""
        code = 0
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._follow_signals)
            if self._directory is not None:
                tasks.start_soon(self._follow_changes, self._directory)
            while not self._stopping.is_set():
                self._changed = anyio.Event()
                code = await self._run_worker()
                if self._directory is None:
                    break
            tasks.cancel_scope.cancel()
        return code

    async def _run_worker(self) -> int:
        """One worker, to its end; where code is watched, until there is a reason for another."""
        worker = WorkerProcess(self._arguments, self._environ, self._limit, self._print_note)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.watch)
            await first_of(worker.ended, self._changed, self._stopping)
            if not worker.ended.is_set():
                await worker.stop(self._urgent)
            elif self._directory is not None:
                self._print_note(
                    f"riverpy dev: the worker ended with code {worker.exit_code}; "
                    "it starts again when a file changes"
                )
                await first_of(self._changed, self._stopping)
        return worker.exit_code

    async def _follow_signals(self, *, task_status: TaskStatus[None]) -> None:
        # Here and not in the module, since Windows lacks two of them.
        stop_signals = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
        with anyio.open_signal_receiver(*stop_signals) as signals:
            task_status.started()
            async for _ in signals:
                if self._stopping.is_set():
                    self._urgent.set()
                else:
                    self._print_note("riverpy dev: stopping; once more to stop at once")
                    self._stopping.set()

    async def _follow_changes(self, directory: Path) -> None:
        from watchfiles import awatch  # pyright: ignore[reportUnknownVariableType] (its stop_event)

        async for changes in awatch(
            directory, watch_filter=_filter(), debounce=_GROUP_MOST, step=_QUIET
        ):
            if not self._stopping.is_set():
                self._print_note(f"riverpy dev: {_names(changes, directory)} changed, restarting")
                self._changed.set()


async def first_of(*events: anyio.Event) -> None:
    """Wait until one of them is set."""
    async with anyio.create_task_group() as tasks:

        async def wait_for(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait_for, event)


def _names(changes: set[tuple[Change, str]], directory: Path) -> str:
    names = sorted({os.path.relpath(path, directory) for _, path in changes})
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _filter() -> Callable[[Change, str], bool]:
    """What counts as a change: Python's files and ours, but for what was installed."""
    from watchfiles import DefaultFilter

    usual = DefaultFilter(ignore_dirs=(*DefaultFilter.ignore_dirs, *_IGNORED))

    def is_ours(change: Change, path: str) -> bool:
        name = Path(path).name
        return (name.endswith(".py") or name in _SETTINGS_FILES) and usual(change, path)

    return is_ours
