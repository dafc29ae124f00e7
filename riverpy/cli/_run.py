"""Runs a command in an event loop, and prints its errors.

An expected failure, for example of the database, the network or a file, prints one line on stderr,
and the exit code is 1. A wrong setting, a wrong argument or a job that cannot be inserted prints
one line, and the exit code is 2. Any other error is a bug in riverpy and prints its traceback. With
the setting `debug`, all errors print their tracebacks.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import click

from riverpy._dsn import mask_passwords
from riverpy._error_text import format_error_with_type
from riverpy._log import get_logger
from riverpy._log_events import LEFTOVER_TASKS_CANCELLED, PROCESS_EXIT_IGNORED
from riverpy.cli._output import make_printable, print_note
from riverpy.cli._settings import DEBUG, SettingsError, SettingSources
from riverpy.errors import ConfigError, InsertError, RiverError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Generator

ArgsT = TypeVarTuple("ArgsT")
ResultT = TypeVar("ResultT")

EXIT_FAILURE = 1
EXIT_USAGE_ERROR = 2
EXIT_NOT_READY = 3
EXIT_UNCLEAN_STOP = 4
EXIT_WARNING = 5
EXIT_LIMIT_REACHED = 10
"""The exit code of a worker that has reached one of its limits. The codes 6 and 7 are not used,
because `systemctl status` shows them with a different meaning."""

COMMAND_ARGUMENTS_KEY = "riverpy.arguments"
"""The key in click's `Context.meta` for the arguments of `riverpy`, as a tuple."""
MAIN_MODULE_KEY = "riverpy.main_module"
"""The key in click's `Context.meta` for the name of a module. If it is set, worker processes call
the function `main` of this module instead of that of `riverpy.cli`."""
IS_PROCESS_KEPT_KEY = "riverpy.is_process_kept"
"""The key in click's `Context.meta` whose value is True if the process continues after the command,
for example in a test that runs a worker."""
_DEBUG_CONTEXT_KEY = "riverpy.debug"
_TABLE_MISSING_SQLSTATE = "42P01"


class CommandError(click.ClickException):
    """Ends a command: prints one line on stderr and exits with a code, by default 1."""

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # pyright: ignore[reportAttributeAccessIssue] (click does it too)

    def show(self, file: IO[Any] | None = None) -> None:
        print_note(f"riverpy: {text_to_one_line(self.message)}")


def run_async(function: Callable[[*ArgsT], Coroutine[Any, Any, ResultT]], *args: *ArgsT) -> ResultT:
    """Run `function(*args)` in a new event loop, and return its result. The event loop is uvloop's
    if uvloop is installed.

    Raises:
        CommandError: the function failed with an expected error.
    """
    import anyio  # commands without a database, such as `riverpy --version`, do not need it

    with translate_to_command_errors():
        return anyio.run(function, *args, backend_options={"use_uvloop": _is_uvloop_installed()})


def make_asyncio_runner() -> asyncio.Runner:
    """Return an asyncio runner. Its event loop is uvloop's if uvloop is installed."""
    import asyncio

    if not _is_uvloop_installed():
        return asyncio.Runner(loop_factory=asyncio.new_event_loop)
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def run_until_complete(
    coroutine: Coroutine[Any, Any, ResultT],
    loop: asyncio.AbstractEventLoop,
    on_loop_start: Callable[[], object],
) -> ResultT:
    """Run a coroutine until it ends, in an event loop that also runs code of the user.

    Code of the user can stop the event loop with SystemExit, KeyboardInterrupt or `loop.stop()`.
    Then an error is logged, and the event loop is started again.

    Args:
        coroutine: the coroutine of the main task.
        loop: the event loop. It is not closed.
        on_loop_start: is called in the event loop after each of its starts.
    """
    task = loop.create_task(coroutine)
    while True:
        loop.call_soon(on_loop_start)
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
            if task.done():
                raise
            log = get_logger()
            log.error(
                PROCESS_EXIT_IGNORED,
                effect="the worker keeps running",
                error=format_error_with_type(error),
            )


def close_asyncio_runner(runner: asyncio.Runner) -> None:
    """Cancel the tasks that are still running, wait for them and for the threads of the event loop,
    and close the event loop."""
    import asyncio

    if count := len(asyncio.all_tasks(runner.get_loop())):
        log = get_logger()
        log.warning(LEFTOVER_TASKS_CANCELLED, count=count)
    with suppress(SystemExit, KeyboardInterrupt):  # a cancelled task may raise them
        runner.close()


@contextmanager
def translate_to_command_errors() -> Generator[None]:
    """Raise a CommandError for an expected error of the `with` block. An exception group with only
    one error is handled like that error."""
    try:
        yield
    except Exception as error:
        cause = _unwrap_single_error(error)
        if isinstance(cause, click.ClickException | click.exceptions.Exit | click.Abort):
            raise cause from None
        from riverpy._postgres.driver import DATABASE_ERRORS

        is_expected = isinstance(cause, (RiverError, *DATABASE_ERRORS))
        if isinstance(cause, BrokenPipeError) or not is_expected:
            raise
        print_traceback_if_debug(error)
        is_usage = isinstance(cause, ConfigError | InsertError)  # the input of the command is wrong
        code = EXIT_USAGE_ERROR if is_usage else EXIT_FAILURE
        text = error_to_one_line(cause)
        if getattr(cause, "sqlstate", None) == _TABLE_MISSING_SQLSTATE:
            text += ": `riverpy doctor` finds missing tables and says what to do"
        raise CommandError(text, exit_code=code) from error


def print_click_error(error: click.ClickException) -> int:
    """Print an error that ended a command as one line on stderr, and return its exit code."""
    CommandError(_format_with_usage_hint(error)).show()
    return error.exit_code


def _format_with_usage_hint(error: click.ClickException) -> str:
    message = text_to_one_line(error.format_message())
    if not isinstance(error, click.UsageError):
        return message
    context = error.ctx or click.get_current_context(silent=True)
    if context is None:
        return message
    takes_arguments = any(isinstance(one, click.Argument) for one in context.command.params)
    if isinstance(error, click.NoSuchOption) and takes_arguments:
        message = f"{message.rstrip('.')}; write -- before an argument that begins with -"
    return f"{message.rstrip('.')} (see {context.command_path} --help)"


def error_to_one_line(error: BaseException) -> str:
    """Return the text of an error on one line, without passwords."""
    from riverpy._postgres.driver import describe_error

    text = text_to_one_line(describe_error(error))
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return mask_passwords(text or type(error).__name__)


def text_to_one_line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return make_printable(" ".join(text.split()))


def print_traceback_if_debug(error: BaseException) -> None:
    """Print the traceback of an error on stderr if the setting `debug` is on."""
    if _is_debug_enabled():
        sys.stderr.write(mask_passwords("".join(traceback.format_exception(error))))


def _is_debug_enabled() -> bool:
    flag = get_debug_flag()
    try:
        return bool(SettingSources().find_value(DEBUG, flag).or_none())
    except SettingsError:  # the error to show may be a wrong value of `debug`
        return bool(flag)


def get_debug_flag() -> bool | None:
    """Return True for the option `--debug`, False for `--no-debug`, and None without either."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.find_root().meta.get(_DEBUG_CONTEXT_KEY)


def _store_debug_flag(ctx: click.Context, _param: click.Parameter, value: bool | None) -> None:
    if value is not None:
        ctx.find_root().meta[_DEBUG_CONTEXT_KEY] = value


debug_option = DEBUG.click_option(expose_value=False, callback=_store_debug_flag)
"""The decorator that adds the option `--debug/--no-debug` to a command."""


def _is_uvloop_installed() -> bool:
    return find_spec("uvloop") is not None


def _unwrap_single_error(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _unwrap_single_error(group.exceptions[0]) if len(group.exceptions) == 1 else group
