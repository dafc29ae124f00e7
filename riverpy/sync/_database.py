"""BlockingDatabase: opens transactions for calls of a blocking client without `tx`."""

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
"""Parts of libpq's error texts for refused logins, which have no error code. A server may send
other languages: then a call tries again for a while."""
Isolation: TypeAlias = Literal["read_committed", "repeatable_read"] | None
"""The isolation level of a transaction; None: the default of the connection."""


class BlockingDatabase(ABC):
    """The base of the databases of a blocking client."""

    url: str | None = None
    """The URL of the database. None: the client was created without a URL."""
    is_open = True
    """Whether a transaction can be opened."""

    def open(self) -> None:
        """Open connections, if the client makes its own. Otherwise do nothing."""
        return

    def close(self) -> None:
        """Close the connections that the client has made."""
        return

    @abstractmethod
    def transaction(self, isolation: Isolation) -> AbstractContextManager[CallerSession]:
        """Open a transaction for a `with` block. The end of the block commits, and an exception
        rolls back.

        Raises:
            OSError: no connection could be made.
            TimeoutError: no connection became free.
            PostgresError: the server refused the commit.
        """


@contextmanager
def translate_block_errors(
    block: AbstractContextManager[T],
    error_type: type[Exception],
    translate: Callable[[Any], Exception],
    translate_start: Callable[[Any], Exception] | None = None,
) -> Generator[T]:
    """Enter and exit a context manager of another library, and translate its own errors. Errors of
    the `with` block stay as they are. `translate_start` translates errors of the start; None:
    `translate` does."""
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
    """Return the error for a connection that could not be made. `hosts` names the server."""
    text = mask_passwords(" ".join(str(error).split())) or type(error).__name__
    place = f"to {hosts}" if hosts else "to the database"
    error_type = TimeoutError if "timeout" in type(error).__name__.lower() else ConnectionError
    if any(refusal in text for refusal in _LOGIN_REFUSED_TEXTS):
        error_type = LoginRefusedError
    return error_type(f"cannot connect {place}: {text}")
