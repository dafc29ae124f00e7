"""Whether a command of `riverpy` exists, for commands that pages of docs name."""

from __future__ import annotations

import click

from riverpy.cli import main


def is_command(words: list[str]) -> bool:
    """Whether the words after `riverpy` begin with the name of a command, and each option is an
    option of this command. A group, such as `riverpy job`, is a command too."""
    command: click.Command = main
    for word in words:
        if word.startswith("-") and word != "-":
            if word.split("=")[0] not in _option_names(command):
                return False
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            if found is None:
                return False
            command = found
    return True


def _option_names(command: click.Command) -> list[str]:
    names = ["-h", "--help"]
    return names + [name for one in command.params for name in (*one.opts, *one.secondary_opts)]
