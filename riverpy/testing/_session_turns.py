"""SessionTurns: lets the tasks of a test use the test's only connection one after the other.

In a test all SQLAlchemy sessions of the application share one connection, and the transaction of a
session is a savepoint. The savepoint that begins last must end first, so the transactions of two
tasks must not overlap. A task waits until the other task has ended its transaction, as with a pool
of one connection. A task does not wait for itself, or for the task that started it.

A turn is the time in which one session has an open savepoint.
"""

from __future__ import annotations

import asyncio
import weakref
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._without_loop import get_current_task, get_running_loop
from riverpy.errors import ConfigError, TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from contextlib import AbstractAsyncContextManager

_MIXED_TEXT = (
    "Here all sessions share a connection, so this is not what happens in production. Code with "
    "overlapping transactions needs a test with riverpy_client and riverpy_jobs.drain(): there "
    "each session has a connection"
)

_OVERLAP_TEXT = (
    "a session has ended while another one, which began later, was open: the commits and rollbacks "
    f"of the later one have no effect of their own. {_MIXED_TEXT}"
)


class MixedSessionsError(TransactionError):
    """The sessions of a test overlapped in a way that gives another result than in production."""


TURN_TIMEOUT = 2.0
"""How long a task waits for the transaction of another task, in seconds. After this time, the task
begins its own transaction although the two overlap, because the other task may be waiting for
it."""

_READ_ONLY_KEYWORDS = frozenset({"select", "savepoint", "release", "rollback", "set", "show"})


class _ConnectionTurn:
    """A turn: the time in which one session, or one call of a client, has an open savepoint."""

    def __init__(self, session: object | None) -> None:
        """Begin a turn of `session`, which is stored as a weak reference. None: the turn belongs to
        a client call."""
        self._task = get_current_task()
        self._session = None if session is None else weakref.ref(session)
        self.has_ended = False
        self.is_committed = False
        self.has_written = False
        self.has_committed_inside = False
        """Whether, since this turn began, another session has begun a turn, written and committed.
        If this turn is rolled back, that commit is undone."""

    @property
    def is_of_session(self) -> bool:
        """Whether the turn belongs to a session. Otherwise it belongs to a client call."""
        return self._session is not None

    def is_open(self) -> bool:
        """Return False if the turn or its task has ended, or its session no longer exists."""
        is_forgotten = self._session is not None and self._session() is None
        has_task = self._task is None or not self._task.done()
        return not (self.has_ended or is_forgotten) and has_task


_turns_of_task: ContextVar[tuple[_ConnectionTurn, ...]] = ContextVar(
    "riverpy_turns_of_task", default=()
)


class SessionTurns:
    """Lets the sessions and client calls that share a test's connection use it one after the other.
    A turn is the time in which one of them has an open savepoint. Call all methods in the event
    loop of the test."""

    def __init__(self) -> None:
        self._turns: list[_ConnectionTurn] = []
        self._turn_by_session: weakref.WeakKeyDictionary[Any, _ConnectionTurn] = (
            weakref.WeakKeyDictionary()
        )
        self._ended = asyncio.Event()
        self._loop = get_running_loop()
        self.error: MixedSessionsError | None = None
        """The error to raise at the end of the test, if sessions overlapped in a wrong way."""

    def require_test_loop(self) -> None:
        """Check that the caller runs in the event loop of the test.

        Raises:
            ConfigError: the caller runs in another event loop, where it cannot use the connection.
        """
        if get_running_loop() is not self._loop:
            raise ConfigError(
                "a session of riverpy_session_makers is used in another event loop than the test, "
                "whose connection it would share: give fixtures and tests the same loop. With "
                "pytest-asyncio, set asyncio_default_fixture_loop_scope and "
                "asyncio_default_test_loop_scope to the same scope"
            )

    def has_open_turns(self) -> bool:
        """Return whether a session of the application has an open turn, i.e. an open savepoint."""
        return any(turn.is_of_session and turn.is_open() for turn in self._turns)

    def record_statement(self, statement: str) -> None:
        """If the statement can write, mark the newest turn as a turn that has written."""
        first_word = statement.lstrip("( \n").partition(" ")[0].lower()
        if self._turns and first_word not in _READ_ONLY_KEYWORDS:
            self._turns[-1].has_written = True

    def record_commit(self, session: object) -> None:
        """Mark the turn of a session as committed."""
        if (turn := self._turn_by_session.get(session)) is not None:
            turn.is_committed = True

    def require_commit_order(self, session: object) -> None:
        """Check that no other session has an open turn that began after the turn of this session.

        Raises:
            MixedSessionsError: another session has a later open turn. The commit would remove its
                savepoint.
        """
        turn = self._turn_by_session.get(session)
        if turn is not None and self._has_later_open_session_turn(turn):
            self.error = MixedSessionsError(_OVERLAP_TEXT)
            raise self.error

    def _has_later_open_session_turn(self, turn: _ConnectionTurn) -> bool:
        """Return whether a session has an open turn that began after this turn."""
        later = self._turns[self._turns.index(turn) + 1 :] if turn in self._turns else []
        return any(one.is_of_session and one.is_open() for one in later)

    def has_turn(self, session: object) -> bool:
        """Return whether this session has an open turn."""
        turn = self._turn_by_session.get(session)
        return turn is not None and not turn.has_ended

    def can_begin_turn(self) -> bool:
        """Return whether the calling task may begin a turn now: no turn is open, or the newest
        open turn was begun by this task, or by its parent task before it started this task."""
        self._turns = [turn for turn in self._turns if turn.is_open()]
        return not self._turns or self._turns[-1] in _turns_of_task.get()

    async def wait_until_turn_can_begin(self) -> None:
        """Wait until the calling task may begin a turn, but at most `TURN_TIMEOUT` seconds."""
        with anyio.move_on_after(TURN_TIMEOUT):
            while not self.can_begin_turn():
                self._ended.clear()
                await self._ended.wait()

    def begin_turn(self, session: object | None) -> _ConnectionTurn:
        """Begin a turn of the calling task. The turn belongs to `session` or, if that is None, to a
        client call."""
        turn = _ConnectionTurn(session)
        self._turns.append(turn)
        if session is not None:
            self._turn_by_session[session] = turn
        open_turns = [one for one in _turns_of_task.get() if not one.has_ended]
        _turns_of_task.set((*open_turns, turn))
        return turn

    def end_session_turn(self, session: object) -> None:
        """End the turn of a session, if it has one."""
        if (turn := self._turn_by_session.pop(session, None)) is not None:
            self._check_overlap_at_turn_end(turn)
            self._end_turn(turn)

    def _check_overlap_at_turn_end(self, turn: _ConnectionTurn) -> None:
        """At the end of a turn, set `error` if the sessions overlapped in a wrong way.

        A committed turn sets no error. But the rollback of an earlier turn would undo its commit.
        So if the committed turn has written, or another session has committed inside it, set
        `has_committed_inside` of all turns that began earlier.

        A turn without a commit sets `error` in two cases: a session whose turn began later is still
        open, or another session has committed inside this turn, so that the rollback of this turn
        undoes that commit."""
        if turn.is_committed:
            index = self._turns.index(turn) if turn in self._turns else 0
            for outer in self._turns[:index]:
                if turn.has_written or turn.has_committed_inside:
                    outer.has_committed_inside = True
        elif self._has_later_open_session_turn(turn):
            self.error = self.error or MixedSessionsError(_OVERLAP_TEXT)
        elif turn.has_committed_inside and self.error is None:
            self.error = MixedSessionsError(
                "a session was rolled back, or closed without a commit, after another session had "
                "committed inside its transaction: what that session wrote was undone too. "
                f"{_MIXED_TEXT}; or commit the outer session first"
            )

    @asynccontextmanager
    async def hold_turn(self) -> AsyncGenerator[None]:
        """Return a context manager that holds a turn for a client call. Other tasks wait until the
        turn has ended, but at most `TURN_TIMEOUT` seconds."""
        if not self.can_begin_turn():
            await self.wait_until_turn_can_begin()
        turn = self.begin_turn(None)
        try:
            yield
        finally:
            self._end_turn(turn)

    def _end_turn(self, turn: _ConnectionTurn) -> None:
        turn.has_ended = True
        self._ended.set()


_shared_turns: list[SessionTurns] = []
"""A list with the `SessionTurns` of the running test. The list is empty if the sessions of the test
do not share a connection."""


@contextmanager
def sharing_turns(turns: SessionTurns) -> Generator[None]:
    """In the `with` block, let the client calls of jobs take turns with the sessions of the
    test."""
    _shared_turns.append(turns)
    try:
        yield
    finally:
        _shared_turns.remove(turns)


def hold_shared_turn() -> AbstractAsyncContextManager[None]:
    """Return a context manager that waits for a turn of the test's connection and holds it. If the
    sessions of the running test do not share a connection, the context manager does nothing."""
    return _shared_turns[-1].hold_turn() if _shared_turns else nullcontext()
