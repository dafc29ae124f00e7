"""Closes Django's connections around jobs, as Django does around requests: connections that are
older than CONN_MAX_AGE, that are unusable after an error, or whose transaction a job has left open.

A worker runs no requests, so Django itself would never close them.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import SyncToAsync
from django.db import close_old_connections, connections, reset_queries

from riverpy._log import get_logger
from riverpy._log_events import TRANSACTION_LEFT_OPEN
from riverpy._plugins import add_process_wide_plugin

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy.job import Job
    from riverpy.middleware import WorkInner

CHILD_SETUP_FUNCTION = "riverpy.django.child:set_up_django"


class ConnectionCloser:
    """Closes old connections before and after each job, in the thread that runs the job."""

    child_setup_path = CHILD_SETUP_FUNCTION

    def __init__(self) -> None:
        self._is_closing = False
        """Whether the thread for queries of async code already has a request to close
        connections."""

    @contextmanager
    def around_blocking_job(self) -> Generator[None]:
        """Close old connections of this thread, before and after a blocking job."""
        _close_connections()
        try:
            yield
        finally:
            _close_connections()

    async def work(self, _job: Job[Any], do_inner: WorkInner, /) -> None:
        """Run a job. After it, let Django's thread for queries of async code close its old
        connections, if the thread exists. Do not wait for it: the thread may run a query of another
        job."""
        try:
            await do_inner()
        finally:
            if _is_async_query_thread_used() and not self._is_closing:
                self._is_closing = True
                with suppress(RuntimeError):  # the interpreter may be ending
                    SyncToAsync.single_thread_executor.submit(self._close_in_async_query_thread)

    def _close_in_async_query_thread(self) -> None:
        self._is_closing = False
        _close_connections()


def _close_connections() -> None:
    reset_queries()  # with DEBUG, each connection stores its last queries
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            # A job has left its `atomic()` block open. Django would use the closed connection, with
            # this transaction, for all later jobs of the thread.
            get_logger().warning(TRANSACTION_LEFT_OPEN, database=connection.alias)
            connection.close()
            del connections[connection.alias]
    close_old_connections()
    for connection in connections.all(initialized_only=True):
        # Let Django test the connection at the next query, as CONN_HEALTH_CHECKS does. A lost
        # connection would otherwise cost a job an attempt.
        cast("Any", connection).health_check_enabled = True


def _is_async_query_thread_used() -> bool:
    """Return whether the thread of `sync_to_async` runs. Then it may have connections."""
    return bool(getattr(SyncToAsync.single_thread_executor, "_threads", True))


def install_connection_closer() -> None:
    """Close Django's connections around the jobs of all clients of this process."""
    add_process_wide_plugin(ConnectionCloser())
