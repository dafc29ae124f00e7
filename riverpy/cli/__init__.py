"""The command `riverpy`: one module per noun, imported only when its command runs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {
    "bench": "Measure insert rate, work rate and pickup latency on a database.",
    "db": "Start, stop and inspect the embedded PostgreSQL.",
    "demo": "Run real jobs on real files, with no database to set up.",
    "insert": "Insert one job with raw JSON args.",
    "job": "List and show jobs.",
    "migrate": "Make, update and check River's tables.",
    "worker": "Work jobs until told to stop.",
}


class _Commands(click.Group):
    """Commands whose modules are imported when they are needed: `--help` stays quick."""

    def list_commands(self, ctx: click.Context) -> Sequence[str]:  # type: ignore[override]
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(import_module(f"riverpy.cli.{cmd_name}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("riverpy"), prog_name="riverpy")
def main() -> None:
    """The River job queue for asyncio Python on PostgreSQL."""
