"""Reads the kinds and queues that users can select in the filters of the admin pages."""

from __future__ import annotations

from django.db import connections

from riverpy._postgres.sql_files import get_query
from riverpy._without_loop import run_without_loop
from riverpy.django.schema import adapt_django_connection
from riverpy.django.settings import read_settings

OFFERED_NAMES_MAX = 200
"""The maximum number of kinds that users can select in a filter. For queues, see
`list_queue_names`."""
SEARCHED_KINDS_MAX = 5_000
"""The maximum number of kinds that are read to find those that contain a search text."""


def list_job_kinds(limit: int = OFFERED_NAMES_MAX) -> list[str]:
    """Return at most `limit` kinds of stored jobs, sorted by name."""
    return _fetch_first_column("django_admin", "admin_kinds", limit)


def list_queue_names() -> list[str]:
    """Return the names of the queues that have a row, or that have jobs in a state that is not
    final. The names are sorted. `OFFERED_NAMES_MAX` limits the queues with a row and, for each such
    state, the queues with jobs. So the result can have more names than that."""
    return _fetch_first_column("top", "top_queue_names", OFFERED_NAMES_MAX)


def _fetch_first_column(file: str, statement: str, limit: int) -> list[str]:
    settings = read_settings()
    session = adapt_django_connection(connections[settings.database])
    query = get_query(file, statement, settings.schema)
    return [row[0] for row in run_without_loop(query.fetch(session, limit=limit))]
