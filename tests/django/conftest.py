"""Fixtures: a Django project in this process, with a database of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests._database import create_database, drop_database, new_database_name, run_apart
from tests.django import project

project.set_up()

from django.core.management import call_command  # noqa: E402
from django.db import connection, connections  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(scope="session")
def project_url(server_url: str) -> Generator[str]:
    """Create all tables with `manage.py migrate`. Yield the URL of the database."""
    name = new_database_name()
    url = run_apart(create_database, server_url, name)
    project.use_database(url)
    call_command("migrate", verbosity=0, skip_checks=True)
    yield url
    connections.close_all()
    run_apart(drop_database, server_url, name)


@pytest.fixture(autouse=True)
def _empty_tables(project_url: str) -> Generator[None]:
    """Empty the tables, and close Django's connections, after each test."""
    yield
    connections.close_all()
    with connection.cursor() as cursor:
        cursor.execute("truncate river_job, river_queue, shop_order, auth_user cascade")
    connections.close_all()
