"""The command `riverpy`. Each subcommand has its own module, which is imported when the subcommand
runs."""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from typing import Any

import click

from riverpy._version import VERSION
from riverpy.cli._logging import configure_default_logging
from riverpy.cli._run import (
    COMMAND_ARGUMENTS_KEY,
    debug_option,
    print_click_error,
    translate_to_command_errors,
)

_COMMANDS = {
    "bench": "Measure how fast jobs are inserted, started and worked.",
    "db": "Start, stop and inspect the embedded PostgreSQL.",
    "demo": "Run example jobs, without a database to set up.",
    "dev": "Run a worker for development, with a database.",
    "doctor": "Find problems, and show how to fix them.",
    "domain": "List leader domains, and move queues between them.",
    "events": "Follow the events of a worker on this machine.",
    "health": "Report whether workers run jobs, for probes and scripts.",
    "insert": "Insert one job with JSON args.",
    "job": "List, show, retry, cancel and delete jobs.",
    "leader": "Show the leader, and request that it resigns.",
    "lease": "List leases and singletons, and request that a holder releases one.",
    "migrate": "Create, update and check the tables of River and riverpy.",
    "periodic": "List periodic jobs, show their next times, run, pause and resume them.",
    "queue": "List, pause and resume queues.",
    "top": "Watch queues, workers, rates, waiting times and the leader.",
    "web": "Serve the dashboard: pages about jobs, queues and workers.",
    "worker": "Work jobs until the process is stopped.",
}


class CommandGroup(click.Group):
    """The group of all subcommands. It imports the module of a subcommand only when it is needed,
    so that `--help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(f"riverpy.cli.{cmd_name}"), cmd_name)
        if not gc.isenabled():  # riverpy.__main__ has disabled it
            gc.freeze()
            gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name]) for name in self.list_commands(ctx)])

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        arguments = tuple(args)  # click removes the arguments from `args`
        with translate_to_command_errors():  # --help and --version print here
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[COMMAND_ARGUMENTS_KEY] = arguments
        return context

    def invoke(self, ctx: click.Context) -> Any:
        with translate_to_command_errors():
            return super().invoke(ctx)

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        """Run a subcommand and exit. An error is printed as one line on stderr."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        _open_missing_standard_streams()
        configure_default_logging()
        try:
            result = super().main(*args, standalone_mode=False, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            sys.exit(print_click_error(error))
        except click.Abort:
            click.echo("riverpy: interrupted", err=True)
            sys.exit(128 + signal.SIGINT)
        sys.exit(result if isinstance(result, int) else 0)


@click.group("riverpy", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="riverpy")
@debug_option
def main() -> None:
    """Run workers, and manage the jobs, queues and tables of River, a job queue on PostgreSQL."""


def _open_missing_standard_streams() -> None:
    """Open the null device in place of each standard stream (stdin, stdout, stderr) that is closed.

    Otherwise the system gives the descriptor of the closed stream to the next opened file or
    socket. If this is the socket to the database, output for the terminal is sent to the database.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
