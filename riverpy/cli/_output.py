"""Prints the output of commands: data as JSON or tables on stdout, notes for the user on stderr.
Passwords in notes are masked."""

from __future__ import annotations

import os
import select
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from riverpy._dsn import mask_passwords

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from typing import IO

_STDERR_FD = 2
_ATOMIC_WRITE_BYTES_MAX = 512
"""The maximum size in bytes of a write that must not block. It is the minimum of PIPE_BUF in POSIX:
if a pipe is ready for writing, a write of at most PIPE_BUF bytes does not block."""


def make_printable(text: str) -> str:
    """Replace each control character of a text with `?`, because it could change the state of the
    terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def print_text(text: str) -> None:
    """Print text on stdout. If the reader of stdout has ended, drop this and all later output."""
    try:
        click.echo(text)
    except BrokenPipeError:
        redirect_stdout_to_devnull()


def redirect_stdout_to_devnull() -> None:
    """Redirect stdout to the null device, because its reader has ended."""
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), sys.stdout.fileno())


def print_json(value: object) -> None:
    """Print a value on stdout as one line of JSON. Times are in the RFC 3339 format."""
    print_text(msgspec.json.encode(value).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout with aligned columns. None is shown as `-`. Columns of numbers are
    aligned right."""
    table = list(rows)
    cells = [["-" if cell is None else make_printable(str(cell)) for cell in row] for row in table]
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
    """Return the text of a time, or None for None. The text has milliseconds if the time has a
    fraction of a second. For a time in UTC, it has no offset."""
    if value is None:
        return None
    spec = "milliseconds" if value.microsecond else "seconds"
    return value.isoformat(sep=" ", timespec=spec).removesuffix("+00:00")


def print_note(text: str) -> None:
    """Print a note for the user on stderr. Passwords are masked."""
    click.echo(mask_passwords(text), err=True)


def print_note_before_exit(text: str) -> None:
    """Print a note on stderr shortly before the process exits. If the write would block, drop the
    note."""
    with suppress(OSError, ValueError):
        if select.select([], [_STDERR_FD], [], 0)[1]:
            os.write(_STDERR_FD, f"{mask_passwords(text)}\n".encode()[:_ATOMIC_WRITE_BYTES_MAX])


def should_use_color(stream: IO[str]) -> bool:
    """Return whether to print colours on a stream: it must be a terminal, TERM must not be `dumb`,
    and NO_COLOR must not be set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def find_riverpy_command() -> str:
    """Return the shell command that starts this program. It is the name of the program if that is
    found in PATH, otherwise the path."""
    import shutil  # its import takes long, and few commands need it

    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m riverpy"
    found = shutil.which(path.name)
    if found is not None and Path(found).resolve() == path.resolve():
        return shlex.quote(path.name)
    return shlex.quote(str(path.absolute()))
