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
    try:
        from riverpy.embedded import EmbeddedPostgres
    except ImportError as error:
        raise CommandError(str(error)) from error
    return EmbeddedPostgres(name)
