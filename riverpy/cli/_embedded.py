"""Finds and starts embedded PostgreSQL servers, i.e. servers that riverpy runs from its own data
directories."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from riverpy.cli._output import print_note
from riverpy.cli._run import CommandError
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from riverpy.embedded import EmbeddedPostgres


def get_embedded_server(name: str) -> EmbeddedPostgres:
    """Return the embedded server with this name. This does not start it."""
    return _import_embedded_postgres()(name)


def start_embedded_server(stack: ExitStack, name: str, command_name: str) -> EmbeddedPostgres:
    """Start the embedded server with this name, and print a note about it on stderr. When `stack`
    is closed, this process no longer uses the server. The server stops if no other process uses
    it."""
    started = time.monotonic()
    server = get_embedded_server(name)
    stack.enter_context(server)
    number = ".".join(map(str, server.version))
    print_note(
        f"{command_name}: PostgreSQL {number} ({server.source}) in {server.directory}, ready in "
        f"{time.monotonic() - started:.1f} s"
    )
    return server


def find_existing_servers(name: str) -> list[EmbeddedPostgres]:
    """Return the embedded servers with this name that have a data directory. There can be one for
    each major version of PostgreSQL; the oldest version is first. Raise CommandError if there is
    none."""
    servers = _import_embedded_postgres().existing(name)
    if not servers:
        raise CommandError(
            f"there is no embedded server {name}: create it with `riverpy db start {name}`"
        )
    return servers


def make_dev_server_name(directory: Path) -> str:
    """Return the name of the embedded server that `riverpy dev` uses in a directory."""
    slug = re.sub("[^a-z0-9]+", "-", directory.name.lower()).strip("-")[:24]
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:6]
    return f"dev-{slug}-{digest}" if slug else f"dev-{digest}"


def find_running_dev_server() -> EmbeddedPostgres | None:
    """Return the running embedded server of `riverpy dev` in the current directory, or None if
    there is none."""
    if sys.platform == "win32":
        return None
    from riverpy._tools.embedded.server import default_base_directory
    from riverpy.embedded import EmbeddedPostgres

    try:
        name = make_dev_server_name(Path.cwd())
        if not any(default_base_directory().glob(f"{name}-pg*")):
            return None  # avoids the call of `existing`, which searches for PostgreSQL's programs
        running = [server for server in EmbeddedPostgres.existing(name) if server.is_running]
    except (OSError, RiverError):
        return None
    return running[-1] if running else None


def _import_embedded_postgres() -> type[EmbeddedPostgres]:
    try:
        from riverpy.embedded import EmbeddedPostgres
    except ImportError as error:
        raise CommandError(str(error)) from error
    return EmbeddedPostgres
