"""What a command prints: data on stdout, as JSON or plain tables; notes on stderr; no password."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from riverpy._dsn import mask_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import IO


def print_json(value: object) -> None:
    """One JSON document on one line of stdout. Times are RFC 3339, Structs objects."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table of aligned columns on stdout. None is shown as `-`; numbers stand to the right."""
    table = list(rows)
    cells = [["-" if cell is None else str(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    right = [
        bool(table) and all(isinstance(row[i], int | float | None) for row in table)
        for i in range(len(columns))
    ]
    for line in [list(columns), *cells]:
        aligned = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        click.echo("  ".join(aligned).rstrip())


def print_note(text: str) -> None:
    """One line for the person at the terminal, on stderr."""
    click.echo(mask_url(text), err=True)


def has_color(stream: IO[str]) -> bool:
    """Whether colours may be written: the stream is a terminal and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def program() -> str:
    """How to call this program again from a shell: by its name where the PATH leads to it."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m riverpy"
    found = shutil.which(path.name)
    if found is not None and Path(found).resolve() == path.resolve():
        return shlex.quote(path.name)
    return shlex.quote(str(path.absolute()))
