"""Commands that run in the process of the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from click.testing import CliRunner

from riverpy._dsn import PG_VARIABLES
from riverpy.cli import main

if TYPE_CHECKING:
    from click.testing import Result


def invoke(*args: str, **environ: str) -> Result:
    """Run a command in this process, without the settings of the machine."""
    clean = dict.fromkeys(("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES), "")
    return CliRunner(env={**clean, **environ}).invoke(main, args)
