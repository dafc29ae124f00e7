"""What commands on leader domains share: the option, and the tables that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import validate_domain
from riverpy._postgres.schema import DOMAINS_VERSION, OWN_LINE, migrate_command
from riverpy.errors import SchemaMissingError

if TYPE_CHECKING:
    import click

    from riverpy.cli._connected import Connected
    from riverpy.cli._options import DatabaseSettings


def domain_name(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """The name of a domain.

    Raises:
        ConfigError: it breaks the rule.
    """
    validate_domain(value)
    return value


def expect_domains(found: Connected, database: DatabaseSettings) -> None:
    """The tables of domains are there.

    Raises:
        SchemaMissingError: they are not; the text has the command that makes them.
    """
    if DOMAINS_VERSION not in found.state.versions(OWN_LINE):
        command = f"riverpy migrate up --line {OWN_LINE}"
        command = migrate_command(command, found.schema, database.required_url())
        raise SchemaMissingError(f"the database lacks the tables of domains: run `{command}`")
