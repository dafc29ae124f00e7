"""Finds the embedded PostgreSQL, on a system that can have one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy.cli._run import CommandError

if TYPE_CHECKING:
    from riverpy.embedded import EmbeddedPostgres


def embedded_server(name: str) -> EmbeddedPostgres:
    """The embedded server of this name; it is not started.

    Raises:
        CommandError: this system has none.
        ConfigError, DatabaseError: as EmbeddedPostgres.
    """
    return _embedded_postgres()(name)


def existing_servers(name: str) -> list[EmbeddedPostgres]:
    """The embedded servers of this name that have data, one for each major, the oldest first.

    Raises:
        CommandError: there is none, or this system has none.
        ConfigError, DatabaseError: as EmbeddedPostgres.
    """
    servers = _embedded_postgres().existing(name)
    if not servers:
        raise CommandError(
            f"there is no embedded server {name}: `riverpy db start {name}` makes one"
        )
    return servers


def _embedded_postgres() -> type[EmbeddedPostgres]:
    try:
        from riverpy.embedded import EmbeddedPostgres
    except ImportError as error:
        raise CommandError(str(error)) from error
    return EmbeddedPostgres
