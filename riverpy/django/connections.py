"""Closes Django's connections before and after each job, as Django does for each request.

Connections are closed if they are older than CONN_MAX_AGE, if they are unusable after an error, or
if a job has left a transaction open. A worker handles no requests, so Django itself would never
close them.
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
        """Whether closing old connections is already scheduled in the thread of `sync_to_async`, in
        which Django runs the queries of async code."""

    @contextmanager
    def around_blocking_job(self) -> Generator[None]:
        """Close old connections of this thread before and after a blocking job."""
        _close_connections()
        try:
            yield
        finally:
            _close_connections()

    async def work(self, _job: Job[Any], do_inner: WorkInner, /) -> None:
        """Run a job. Then let the thread of `sync_to_async`, in which Django runs the queries of
        async code, close its old connections, if this thread exists. Do not wait until they are
        closed, because the thread may be running a query of another job."""
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
            # A job has left its `atomic()` block open. Delete the connection object. Otherwise
            # Django would use it for all later jobs of the thread, with the block still open.
            get_logger().warning(TRANSACTION_LEFT_OPEN, database=connection.alias)
            connection.close()
            del connections[connection.alias]
    close_old_connections()
    for connection in connections.all(initialized_only=True):
        # Let Django test the connection before the next query, as with CONN_HEALTH_CHECKS.
        # Otherwise the attempt of the next job would fail if the connection is lost.
        cast("Any", connection).health_check_enabled = True


def _is_async_query_thread_used() -> bool:
    """Return whether the thread of `sync_to_async` is running. If so, it may have connections."""
    return bool(getattr(SyncToAsync.single_thread_executor, "_threads", True))


def install_connection_closer() -> None:
    """Close Django's connections before and after each job of all clients in this process."""
    add_process_wide_plugin(ConnectionCloser())
