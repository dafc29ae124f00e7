"""ClientCalls: what the methods of a client need from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Transaction
    from riverpy.config import Config


class ClientCalls(ABC):
    """The base of the classes that hold the methods of `Client`.

    A method with `tx` runs in a savepoint of that transaction, so that it stays usable after an
    error. It raises TransactionError if `tx` is closed, aborted or not in a transaction.
    """

    _config: Config

    @property
    @abstractmethod
    def id(self) -> str:
        """The client's id."""

    @property
    @abstractmethod
    def database_url(self) -> str | None:
        """The URL of the database, if the client was given one."""

    @abstractmethod
    def _transaction(
        self,
        tx: Transaction | None,
        *,
        isolation: Literal["read_committed"] | None = "read_committed",
    ) -> AbstractAsyncContextManager[Transaction]:
        """Open a savepoint in `tx` or, without `tx`, a transaction on the client's pool.

        `isolation` applies to the latter; None means the session's default.
        """
