"""What a command prints: data on stdout, as JSON or plain tables; notes on stderr; no password."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from riverpy._dsn import mask_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from typing import IO

_STDERR = 2
_NEVER_WAITS = 512
"""Bytes that a pipe which can be written takes at once, on any system."""


def printable(text: str) -> str:
    """`text` without what commands a terminal: a name in a database may hold it."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def print_text(text: str) -> None:
    """A line, or several, on stdout. When its reader has gone, the command goes on, and ends as if
    all had been read."""
    try:
        click.echo(text)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """The reader of stdout has gone: what is still written, or flushed at the exit, is dropped."""
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), sys.stdout.fileno())


def print_json(value: object) -> None:
    """One JSON document on one line of stdout. Times are RFC 3339, Structs objects."""
    print_text(msgspec.json.encode(value).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table of aligned columns on stdout. None is shown as `-`; numbers stand to the right."""
    table = list(rows)
    cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in table]
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
        print_text("  ".join(aligned).rstrip())


def format_time(value: datetime | None) -> str | None:
    """Whole seconds, unless it has parts of one; an offset, unless it is UTC."""
    if value is None:
        return None
    spec = "milliseconds" if value.microsecond else "seconds"
    return value.isoformat(sep=" ", timespec=spec).removesuffix("+00:00")


def print_note(text: str) -> None:
    """One line for the person at the terminal, on stderr."""
    click.echo(mask_url(text), err=True)


def print_last_note(text: str) -> None:
    """As `print_note`, for a process that must end: dropped if stderr would make it wait."""
    with suppress(OSError, ValueError):
        if select.select([], [_STDERR], [], 0)[1]:
            os.write(_STDERR, f"{mask_url(text)}\n".encode()[:_NEVER_WAITS])


def has_color(stream: IO[str]) -> bool:
    """Whether colours may be written: the stream is a terminal, which TERM does not call dumb, and
    NO_COLOR is not set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def program() -> str:
    """How to call this program again from a shell: by its name where the PATH leads to it."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m riverpy"
    found = shutil.which(path.name)
    if found is not None and Path(found).resolve() == path.resolve():
        return shlex.quote(path.name)
    return shlex.quote(str(path.absolute()))
