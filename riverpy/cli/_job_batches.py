"""Commands that retry, cancel or delete all jobs that match filters. They ask for confirmation,
show the progress and print the result."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import click

from riverpy._tools.text import format_count, format_seconds
from riverpy.cli._connected import open_command_connection
from riverpy.cli._job_filters import describe_filters
from riverpy.cli._output import make_printable, print_json, print_note
from riverpy.cli._run import EXIT_FAILURE, run_async
from riverpy.client import Client
from riverpy.config import Config
from riverpy.job import JobState
from riverpy.job_list import JobChanges

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from riverpy.cli._options import DatabaseSettings
    from riverpy.job_list import JobFilters

BatchVerb: TypeAlias = Literal["retry", "cancel", "delete"]

PROGRESS_NOTE_INTERVAL = 2.0
"""The minimum number of seconds between two notes about the progress if stderr is not a
terminal."""
_ENDED_STATES = (JobState.CANCELLED, JobState.COMPLETED, JobState.DISCARDED)
_PAST_PARTICIPLE_BY_VERB = {"retry": "retried", "cancel": "cancelled", "delete": "deleted"}


class _StopRequestedError(Exception):
    """Raised after a batch, because a signal has requested that the command stops."""


class _StopSignalWatcher:
    """Records the first signal that requests the stop of the command."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        """The number of the signal; None: no signal has arrived."""

    def raise_if_stop_requested(self) -> None:
        """Raise _StopRequestedError if a signal has arrived."""
        if self.signal_number is not None:
            raise _StopRequestedError

    @contextmanager
    def watch_signals(self) -> Generator[None]:
        """Record the first stop signal that arrives during the `with` block. A second signal
        cancels the current task."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def handle_signal(number: int) -> None:
            if self.signal_number is None:
                self.signal_number = number
                if sys.stderr.isatty():
                    click.echo(err=True)  # end the line of the progress bar
                print_note("riverpy: stopping after this batch")
            # A later SIGHUP cancels nothing, because a terminal that closes can send it twice.
            elif task is not None and number != getattr(signal, "SIGHUP", None):
                task.cancel()

        added: list[int] = []
        for number in _list_stop_signals():
            # `add_signal_handler` raises an error on Windows and outside of the main thread.
            with suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, handle_signal, number)
                added.append(number)
        try:
            yield
        finally:
            for number in added:
                loop.remove_signal_handler(number)


def _list_stop_signals() -> list[int]:
    """Return the numbers of the signals that stop the command."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # under `nohup`, SIGHUP is ignored
    return numbers


class _BatchChange(NamedTuple):
    """What a command for many jobs was asked to do: the verb, the filters of the jobs, and the
    options."""

    verb: BatchVerb
    filters: JobFilters
    limit: int | None
    is_confirmed: bool
    as_json: bool


def change_matching_jobs(
    database: DatabaseSettings,
    verb: BatchVerb,
    filters: JobFilters,
    *,
    limit: int | None,
    is_confirmed: bool,
    as_json: bool,
) -> None:
    """Change all jobs that match the filters. Count them first, ask for confirmation, change them
    in batches, and print the result.

    Raises:
        UsageError: confirmation is needed, but stdin is not a terminal.
        Exit: with code 1 if jobs were refused, i.e. could not be changed, for example because
            another job has the same unique key; with 128 plus the number of the signal if a signal
            stopped the command.
    """
    if not is_confirmed and not sys.stdin.isatty():
        raise click.UsageError(
            f"this can {verb} many jobs, and there is no terminal to ask for confirmation: add "
            "--yes"
        )
    change = _BatchChange(verb, filters, limit, is_confirmed, as_json)
    if verb == "cancel":
        change = change._replace(filters=_exclude_ended_states(filters))
    count = 0
    if change.filters.get("states") != ():
        matched = run_async(_count_jobs, database, change)
        count = matched if limit is None else min(matched, limit)
        # Ask while no event loop runs. An event loop would handle Ctrl-C only after the answer.
        if count and not is_confirmed:
            first = "" if count == matched else f"the first {count:,} of "
            which = " that have not ended" if verb == "cancel" else ""
            question = (
                f"{verb.capitalize()} {first}{format_count(matched, 'job')}{which} "
                f"({make_printable(describe_filters(filters))})?"
            )
            click.confirm(question, abort=True, err=True)
    run_async(_change_jobs, database, change, count)


def _exclude_ended_states(filters: JobFilters) -> JobFilters:
    """Return the filters without the states of ended jobs, because a cancellation does not change
    ended jobs. If no state is left, `states` is empty, and no job matches."""
    states = filters.get("states", tuple(JobState))
    return {**filters, "states": tuple(one for one in states if one not in _ENDED_STATES)}


@asynccontextmanager
async def _open_client(database: DatabaseSettings) -> AsyncGenerator[Client]:
    async with open_command_connection(database) as found:
        url, schema = found.database_url, found.schema
    async with Client(url, config=Config(schema=schema, pool_size=2)) as client:
        yield client


async def _count_jobs(database: DatabaseSettings, change: _BatchChange) -> int:
    async with _open_client(database) as client:
        return await client.job_count(**change.filters)


async def _change_jobs(database: DatabaseSettings, change: _BatchChange, count: int) -> None:
    async with _open_client(database) as client:
        await _run_batches(client, change, count)


async def _run_batches(client: Client, change: _BatchChange, count: int) -> None:
    watcher = _StopSignalWatcher()
    last = JobChanges()
    started_at = time.monotonic()
    failure: BaseException | None = None
    try:
        with watcher.watch_signals(), _show_progress(change.verb, count) as show:

            def handle_progress(changes: JobChanges) -> None:
                """Show the changes so far, and raise an error if a stop was requested."""
                nonlocal last
                last = changes
                show(changes)
                watcher.raise_if_stop_requested()

            if count:
                last = await _get_change_method(client, change)(handle_progress)
    except _StopRequestedError:
        pass
    except (asyncio.CancelledError, Exception) as error:
        failure = error
        raise
    finally:
        is_stopped = watcher.signal_number is not None and last.done < count
        is_complete = failure is None and not is_stopped
        seconds = time.monotonic() - started_at
        _print_result(change, count, last, seconds, is_complete=is_complete)
    if watcher.signal_number is not None and not is_complete:
        raise click.exceptions.Exit(128 + watcher.signal_number)
    if last.refused:
        raise click.exceptions.Exit(EXIT_FAILURE)


def _get_change_method(
    client: Client, change: _BatchChange
) -> Callable[[Callable[[JobChanges], object]], Awaitable[JobChanges]]:
    """Return a function that changes the jobs in batches. The argument of this function is a
    callback, which is called with the progress after each batch."""
    if change.verb == "retry":
        return lambda note: client.job_retry_many(
            limit=change.limit, on_progress=note, **change.filters
        )
    if change.verb == "cancel":
        return lambda note: client.job_cancel_many(
            limit=change.limit, on_progress=note, **change.filters
        )
    return lambda note: client.job_delete_in_batches(
        limit=change.limit, on_progress=note, **change.filters
    )


@contextmanager
def _show_progress(verb: BatchVerb, count: int) -> Generator[Callable[[JobChanges], None]]:
    """Yield a function that shows the progress on stderr. It shows a progress bar on a terminal,
    otherwise a line every few seconds."""
    if sys.stderr.isatty():
        with click.progressbar(length=count, label=verb.capitalize(), file=sys.stderr) as bar:
            yield lambda changes: bar.update(min(changes.done, count) - bar.pos)
        return
    noted_at = time.monotonic()

    def show(changes: JobChanges) -> None:
        nonlocal noted_at
        if time.monotonic() - noted_at >= PROGRESS_NOTE_INTERVAL:
            noted_at = time.monotonic()
            print_note(f"{changes.done:,} of {format_count(count, 'job')}")

    yield show


def _print_result(
    change: _BatchChange, count: int, changes: JobChanges, seconds: float, *, is_complete: bool
) -> None:
    if change.as_json:
        reasons = [{"id": job_id, "reason": text} for job_id, text in changes.reasons.items()]
        print_json(
            {
                "action": _PAST_PARTICIPLE_BY_VERB[change.verb],
                "matched": count,
                "complete": is_complete,
                "changed": changes.changed,
                "running": changes.running,
                "unchanged": changes.unchanged,
                "missing": changes.missing,
                "refused": changes.refused,
                "reasons": reasons,
            }
        )
        return
    for job_id, text in changes.reasons.items():
        print_note(f"riverpy: job {job_id} was refused: {make_printable(text)}")
    parts = [f"{_PAST_PARTICIPLE_BY_VERB[change.verb]} {format_count(changes.changed, 'job')}"]
    unchanged = changes.unchanged
    if changes.running and change.verb == "cancel":
        parts[0] += f" ({changes.running:,} running: the workers are notified)"
    elif changes.running:
        parts.append(f"{changes.running:,} running, not {_PAST_PARTICIPLE_BY_VERB[change.verb]}")
        unchanged -= changes.running
    elif change.verb == "cancel" and not count:
        parts[0] += " (ended jobs are not changed)"
    for number, text in (
        (unchanged, "unchanged"),
        (changes.missing, "deleted by others"),
        (changes.refused, "refused"),
    ):
        if number:
            parts.append(f"{number:,} {text}")
    text = f"{', '.join(parts)} in {format_seconds(seconds)}"
    if not is_complete:
        text += f", then interrupted: {max(count - changes.done, 0):,} left"
    click.echo(text)
