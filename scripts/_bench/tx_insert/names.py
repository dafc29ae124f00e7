"""The kinds of sessions, and what is inserted in their transactions."""

from __future__ import annotations

MEASURE = "tx_insert"
SESSIONS = {
    "asyncpg": "asyncpg",
    "psycopg_async": "psycopg, async",
    "sqlalchemy_async_asyncpg": "SQLAlchemy AsyncSession, asyncpg",
    "sqlalchemy_async_psycopg": "SQLAlchemy AsyncSession, psycopg",
    "psycopg": "psycopg",
    "sqlalchemy_psycopg": "SQLAlchemy Session, psycopg",
    "sqlalchemy_psycopg2": "SQLAlchemy Session, psycopg2",
    "django": "Django, psycopg",
}
"""The titles of the sessions."""
ALONE = "alone"
"""The transaction with the caller's own row, and no job."""
BARE = ("row", "row_notify")
"""A bare INSERT of the row of a job, and the same with a NOTIFY."""
INSERT_ONLY = ("riverqueue",)
"""Peers that only insert jobs."""
COLUMNS = (ALONE, *BARE, "riverpy", "pgqueuer", "procrastinate", "chancy", "oban", *INSERT_ONLY)
"""What is measured, in the order of the output."""


def make_measure_key(session: str) -> str:
    """Return the key of the measurement for a kind of session."""
    return f"{MEASURE}_{session}"
