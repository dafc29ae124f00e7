"""Creates the URL of a database from Django's setting DATABASES."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from django.db import connections

if TYPE_CHECKING:
    from collections.abc import Mapping

_ARGUMENTS_NOT_IN_URL = frozenset(
    {
        "autocommit",
        "client_encoding",
        "connection_factory",
        "context",
        "cursor_factory",
        "fallback_application_name",
        "prepare_threshold",
        "row_factory",
    }
)
"""Arguments of psycopg's `connect` that are not added to the URL. They are not parameters of a URL,
or riverpy sets them itself."""


def make_database_url(alias: str) -> str:
    """Return the URL of the database with this alias, including its password. The URL has the
    parameters that Django passes to psycopg, and the role from the option `assume_role`.

    Raises:
        ImproperlyConfigured: the database has no name.
    """
    connection = connections[alias]
    parameters: dict[str, Any] = {**connection.get_connection_params()}
    if role := connection.settings_dict["OPTIONS"].get("assume_role"):
        parameters["role"] = role
    return format_libpq_url(parameters)


def format_libpq_url(parameters: Mapping[str, Any]) -> str:
    """Return a URL with these libpq parameters."""
    texts = {
        name: str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in parameters.items()
        if name not in _ARGUMENTS_NOT_IN_URL and isinstance(value, (str, int, float))
    }
    user, password = texts.pop("user", ""), texts.pop("password", "")
    login = quote(user, safe="")
    if password:
        login += f":{quote(password, safe='')}"
    place = _pop_host_and_port(texts)
    database = quote(texts.pop("dbname", ""), safe="")
    query = urlencode({name: text for name, text in texts.items() if text}, quote_via=quote)
    # asyncpg would use an empty path as the name of the database, and ignore the name that a
    # libpq service defines.
    path = f"/{database}" if database or not query else ""
    return f"postgresql://{login + '@' if login else ''}{place}{path}" + (
        f"?{query}" if query else ""
    )


def _pop_host_and_port(texts: dict[str, str]) -> str:
    """Remove the host and the port from the parameters, and return them as `host:port`. If the host
    is a socket or a list of hosts, remove nothing and return an empty text."""
    host = texts.get("host", "")
    if not host or host.startswith(("/", "@")) or "," in host:
        return ""
    del texts["host"]
    port = texts.pop("port", "")
    name = f"[{host}]" if ":" in host else host
    return f"{name}:{port}" if port else name
