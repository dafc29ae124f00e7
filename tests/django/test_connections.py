"""Django's connections around jobs that run in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.db import connection, connections, transaction
from structlog.testing import capture_logs

from riverpy._log_events import TRANSACTION_LEFT_OPEN
from riverpy.django.connections import ConnectionCloser
from tests.django.shop.models import Order

if TYPE_CHECKING:
    from collections.abc import Generator

around = ConnectionCloser().around_blocking_job


@pytest.fixture(autouse=True)
def _kept_connections() -> Generator[None]:
    """Let Django keep its connections."""
    settings = connections["default"].settings_dict
    settings["CONN_MAX_AGE"] = None
    connection.close()
    yield
    settings["CONN_MAX_AGE"] = 0
    connection.close()


def read_backend() -> int:
    """Return the process of the server for Django's connection."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        return cursor.fetchone()[0]


def test_lost_connection_costs_no_attempt() -> None:
    """A connection that the server has closed between two jobs is replaced at the first query of
    the next job. One that works is kept."""
    backends: list[int] = []
    for _ in range(3):
        with around():
            backends.append(read_backend())
        if len(backends) == 2:
            with connections["other"].cursor() as cursor:
                cursor.execute("select pg_terminate_backend(%s, 5000)", [backends[-1]])
    assert backends[0] == backends[1] != backends[2]


def test_transaction_that_a_job_left_open() -> None:
    """A transaction that a job has entered and not left is rolled back and reported. The next job
    of the thread has a new connection."""
    with capture_logs() as entries, around():
        transaction.atomic().__enter__()
        Order.objects.create(number=1)
    assert [(entry["event"], entry["database"]) for entry in entries] == [
        (TRANSACTION_LEFT_OPEN, "default")
    ]
    with around(), transaction.atomic():
        assert not Order.objects.exists()
        Order.objects.create(number=2)
    assert Order.objects.get().number == 2
