"""The command `manage.py riverpy`. It runs the commands of riverpy on the database of the
project."""

from __future__ import annotations

from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

from django.core.management.base import BaseCommand, CommandParser

from riverpy.django.command import main, run_command

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Sequence

_DJANGO_OPTIONS = ("--settings", "--pythonpath")
"""The options of all Django commands that take a value. `manage.py` has already handled them."""


class _RiverpyParser(CommandParser):
    """A parser that passes all arguments of `call_command` to riverpy, including options."""

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride] (call_command's use)
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        found: Any = super().parse_args([], namespace)
        found.arguments = _remove_django_options([*(args or ())])
        return found


class Command(BaseCommand):
    """Runs a command of riverpy, with the same arguments and exit codes as `riverpy`."""

    help = "The commands of riverpy, such as worker, migrate, job and queue."

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        """Run the command of riverpy that `argv` names, and exit. `manage.py` calls this."""
        main(_remove_django_options(argv[2:]), prog_name=f"{argv[0]} {argv[1]}")

    def print_help(self, prog_name: str, subcommand: str) -> NoReturn:
        """Print the help of riverpy, and exit. `manage.py help riverpy` calls this."""
        main(["--help"], prog_name=f"{prog_name} {subcommand}")

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser for `call_command`. It has the options of all Django commands."""
        base = super().create_parser(prog_name, subcommand, **kwargs)
        return _RiverpyParser(prog=base.prog, parents=[base], add_help=False)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add one argument that takes all arguments of `call_command`."""
        parser.add_argument("arguments", nargs="*")

    def handle(self, *_: Any, arguments: list[str], **options: Any) -> None:
        """Run a command of riverpy for `call_command`, for example `call_command("riverpy", "job",
        "list", "--json")`. If the options `stdout` and `stderr` are given, the output is written to
        these streams."""
        with ExitStack() as stack:
            if (stdout := options.get("stdout")) is not None:
                stack.enter_context(redirect_stdout(stdout))
            if (stderr := options.get("stderr")) is not None:
                stack.enter_context(redirect_stderr(stderr))
            run_command(arguments)


def _remove_django_options(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if is_value:
            is_value = False
        elif argument in _DJANGO_OPTIONS:
            is_value = True
        elif not argument.startswith(tuple(f"{option}=" for option in _DJANGO_OPTIONS)):
            kept.append(argument)
    return kept
