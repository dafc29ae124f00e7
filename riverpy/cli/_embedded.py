"""Finds the embedded PostgreSQL, on a system that can have one."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from riverpy.cli._run import CommandError
from riverpy.errors import RiverError

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


def dev_server_name(directory: Path) -> str:
    """The name of the embedded server of `riverpy dev` in a directory; each has its own."""
    slug = re.sub("[^a-z0-9]+", "-", directory.name.lower()).strip("-")[:24]
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:6]
    return f"dev-{slug}-{digest}" if slug else f"dev-{digest}"


def running_dev_server() -> EmbeddedPostgres | None:
    """The embedded server of `riverpy dev` in the current directory; None if it does not run."""
    if sys.platform == "win32":
        return None
    from riverpy._tools.embedded.server import default_base_directory
    from riverpy.embedded import EmbeddedPostgres

    try:
        name = dev_server_name(Path.cwd())
        if not any(default_base_directory().glob(f"{name}-pg*")):
            return None  # so that most commands do not search for PostgreSQL's programs
        running = [server for server in EmbeddedPostgres.existing(name) if server.is_running]
    except (OSError, RiverError):
        return None
    return running[-1] if running else None


def _embedded_postgres() -> type[EmbeddedPostgres]:
    try:
        from riverpy.embedded import EmbeddedPostgres
    except ImportError as error:
        raise CommandError(str(error)) from error
    return EmbeddedPostgres
