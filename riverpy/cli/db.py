"""`riverpy db`: start, stop and inspect the embedded PostgreSQL."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

from riverpy.cli._embedded import find_existing_servers, get_embedded_server
from riverpy.cli._options import json_option
from riverpy.cli._output import print_json, print_note
from riverpy.cli._run import CommandError, debug_option

if TYPE_CHECKING:
    from riverpy.embedded import EmbeddedPostgres

_SERVER_NAME_DEFAULT = "default"

_server_name_argument = click.argument("name", default=_SERVER_NAME_DEFAULT)


@click.group()
def db() -> None:
    """Start, stop and inspect the embedded PostgreSQL.

    Each server has a NAME and its own data.
    """


@db.command()
@_server_name_argument
@json_option
@debug_option
def start(name: str, as_json: bool) -> None:
    """Start the server, and print its URL. It runs until `riverpy db stop`."""
    server = get_embedded_server(name)
    server.keep()
    _print_server(server, as_json=as_json)


@db.command()
@_server_name_argument
@debug_option
def stop(name: str) -> None:
    """Stop the server of this name, even if programs use it. The server's data is kept. If several
    major versions of PostgreSQL have a server of this name, all of them stop. The exit code is 1 if
    no server of this name runs.
    """
    ran = [server.stop() for server in find_existing_servers(name)]
    print_note(f"{name}: {'stopped' if any(ran) else 'was not running'}")


@db.command()
@_server_name_argument
@json_option
@debug_option
def url(name: str, as_json: bool) -> None:
    """Print the URL of the running server. The exit code is 1 if it does not run."""
    running = [server for server in find_existing_servers(name) if server.is_running]
    if not running:
        raise CommandError(f"{name} is not running: start it with `riverpy db start {name}`")
    here = [server for server in running if server.major == server.version[0]]
    _print_server((here or running)[-1], as_json=as_json)


@db.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("arguments", metavar="[NAME] [PSQL-ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def psql(arguments: tuple[str, ...]) -> None:
    """Start the server, and open psql on it."""
    named = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if named else _SERVER_NAME_DEFAULT
    if named:
        find_existing_servers(name)  # raises an error if NAME has no data: it may be misspelled
    server = get_embedded_server(name)
    program = shutil.which("psql", path=server.binaries) or shutil.which("psql")
    if program is None:
        raise CommandError(
            f"there is no psql in {server.binaries} or on the PATH: install PostgreSQL's client"
        )
    server.start()
    server.pass_on()
    os.execv(program, [program, server.url, *arguments[named:]])  # noqa: S606 (a program, no shell)


@db.command()
@_server_name_argument
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@debug_option
def reset(name: str, yes: bool) -> None:
    """Stop the server, even if programs use it, and delete all its data."""
    server = get_embedded_server(name)
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(
            "this deletes data, and there is no terminal to ask for confirmation: add --yes"
        )
    if not yes:
        click.confirm(f"Delete all data in {server.directory}?", abort=True, err=True)
    server.remove()
    print_note(f"{name}: deleted {server.directory}")


def _print_server(server: EmbeddedPostgres, *, as_json: bool) -> None:
    if not as_json:
        click.echo(server.url)
        return
    is_own = server.major == server.version[0]
    print_json(
        {
            "name": server.name,
            "url": server.url,
            "version": ".".join(map(str, server.version)) if is_own else str(server.major),
            "source": server.source if is_own else None,
            "directory": str(server.directory),
            "log": str(server.log_path),
        }
    )
