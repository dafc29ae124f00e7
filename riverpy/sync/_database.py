"""BlockingDatabase: opens the transactions for calls without `tx` of a blocking client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from riverpy._dsn import mask_passwords
from riverpy._postgres.sessions.errors import LoginRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from riverpy._postgres.sessions.session import CallerSession

T = TypeVar("T")
_LOGIN_REFUSED_TEXTS = (
    "password authentication failed",
    "authentication failed for user",
    "no password supplied",
    "no pg_hba.conf entry",
)
"""Parts of libpq's error texts for refused logins, because these errors have no code. If the server
sends texts in another language, riverpy does not recognize a refused login, and retries the call
for a while."""
Isolation: TypeAlias = Literal["read_committed", "repeatable_read"] | None
"""The isolation level of a transaction; None: the default of the connection."""


class BlockingDatabase(ABC):
    """Opens transactions for a blocking client. Each kind of database (a URL, an engine, a pool or
    a connection) has its own subclass."""

    url: str | None = None
    """The URL of the database. None: the client was created without a URL."""
    is_open = True
    """Whether a transaction can be opened."""

    def open(self) -> None:
        """Open a connection if the client has connections of its own. Otherwise do nothing."""
        return

    def close(self) -> None:
        """Close the connections that the client has opened itself."""
        return

    @abstractmethod
    def transaction(self, isolation: Isolation) -> AbstractContextManager[CallerSession]:
        """Open a transaction for a `with` block. It is committed at the end of the block, or rolled
        back if the block raises an error.

        Raises:
            OSError: the database cannot be reached.
            TimeoutError: no connection of the pool became free in time.
            PostgresError: the server refused the commit.
        """


@contextmanager
def translate_context_manager_errors(
    block: AbstractContextManager[T],
    error_type: type[Exception],
    translate: Callable[[Any], Exception],
    translate_start: Callable[[Any], Exception] | None = None,
) -> Generator[T]:
    """Enter and exit a context manager of another library, and translate the errors that it raises.
    Errors of the code inside the `with` block are not translated.

    Args:
        block: the context manager of the other library.
        error_type: the base class of the errors to translate.
        translate: receives an error and returns the new error.
        translate_start: as `translate`, for errors that are raised while the block is entered.
            None: `translate` is used for these errors too.
    """
    try:
        value = block.__enter__()
    except error_type as error:
        raise (translate_start or translate)(error) from error
    try:
        yield value
    except BaseException as error:
        if not block.__exit__(type(error), error, error.__traceback__):
            raise
        return
    try:
        block.__exit__(None, None, None)
    except error_type as error:
        raise translate(error) from error


def make_connect_error(error: BaseException, hosts: str | None = None) -> OSError:
    """Return the error to raise when a connection cannot be opened. `hosts` is the address of the
    server, or of several servers, for the error text."""
    text = mask_passwords(" ".join(str(error).split())) or type(error).__name__
    place = f"to {hosts}" if hosts else "to the database"
    error_type = TimeoutError if "timeout" in type(error).__name__.lower() else ConnectionError
    if any(refusal in text for refusal in _LOGIN_REFUSED_TEXTS):
        error_type = LoginRefusedError
    return error_type(f"cannot connect {place}: {text}")
