"""Changes by hand: one thing after the other, each in a transaction of its own and told of when it
is done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click

from riverpy._postgres.driver import DATABASE_ERRORS, is_refusal
from riverpy.cli._connected import bounded, connected
from riverpy.cli._output import print_json, print_note
from riverpy.cli._run import EXIT_FAILURE, CommandError, describe, run, show_traceback
from riverpy.client import Client
from riverpy.config import Config
from riverpy.errors import JobDamagedError, NotFoundError, UniqueConflictError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy.cli._options import DatabaseSettings

ThingT = TypeVar("ThingT", int, str)

UNCHANGED = "none"
FAILED = "failed"
NOTE_INTERVAL = 2.0
"""Seconds from one note of how many are done to the next, where lines do not tell."""


class Noun(NamedTuple):
    """What is changed, and the names that `--json` has for it."""

    one: str
    many: str
    key: str


class Change(NamedTuple):
    """What was done to one thing."""

    action: str
    """For programs. `UNCHANGED`: nothing was to be done. `FAILED`: it could not be done."""
    message: str


class _Teller:
    """Prints each change: its line at once, or with `--json` one object in the end."""

    def __init__(self, noun: Noun, total: int, *, as_json: bool) -> None:
        self._noun = noun
        self._total = total
        self._as_json = as_json
        self._changes: list[dict[str, object]] = []
        self._noted_at = time.monotonic()
        self.has_failed = False

    def tell(self, thing: object, change: Change) -> None:
        """One thing was dealt with."""
        self._changes.append({self._noun.key: thing, **change._asdict()})
        self.has_failed = self.has_failed or change.action == FAILED
        if self._as_json:
            self._note()
        elif change.action == FAILED:
            print_note(f"riverpy: {change.message}")
        else:
            click.echo(change.message)

    def end(self) -> None:
        """Nothing more is dealt with, also if it was not all."""
        if self._as_json and self._changes:
            print_json({self._noun.many: self._changes})

    def _note(self) -> None:
        if time.monotonic() - self._noted_at >= NOTE_INTERVAL:
            self._noted_at = time.monotonic()
            print_note(f"{len(self._changes):,} of {self._total:,} {self._noun.many}")


def change_each(
    database: DatabaseSettings,
    noun: Noun,
    things: Sequence[ThingT],
    change: Callable[[Client, ThingT, Transaction], Awaitable[Change]],
    *,
    as_json: bool,
) -> None:
    """Apply `change` to each thing, in their order. One that is not there, or cannot be changed, is
    told of, and the others are changed.

    Raises:
        Exit: one of them could not be changed; the exit code is 1.
        CommandError: the database failed. What was told of is done, and nothing else.
    """
    teller = _Teller(noun, len(things), as_json=as_json)

    async def apply() -> None:
        async with connected(database) as (connection, schema, _state):
            client = Client(config=Config(schema=schema))
            for number, thing in enumerate(things, 1):
                try:
                    done = await bounded("it", _change_one(client, thing, connection, change))
                except DATABASE_ERRORS as error:
                    if _is_refused(error):
                        message = f"{noun.one} {thing} cannot be changed: {describe(error)}"
                        teller.tell(thing, Change(FAILED, message))
                        continue
                    show_traceback(error)
                    rest = "; those after it are left as they are" if number < len(things) else ""
                    raise CommandError(
                        f"changing {noun.one} {thing} failed: {describe(error)}{rest}"
                    ) from error
                teller.tell(thing, done)

    try:
        run(apply)
    finally:
        teller.end()
    if teller.has_failed:
        raise click.exceptions.Exit(EXIT_FAILURE)


def _is_refused(error: Exception) -> bool:
    """Whether this one row is refused, as by a trigger. What the role may not do, or what is not
    there, is the same for all rows."""
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    return is_refusal(error) and not sqlstate.startswith("42")


async def _change_one(
    client: Client,
    thing: ThingT,
    connection: Connection,
    change: Callable[[Client, ThingT, Transaction], Awaitable[Change]],
) -> Change:
    try:
        async with connection.transaction():
            return await change(client, thing, connection)
    except (JobDamagedError, NotFoundError, UniqueConflictError) as error:
        return Change(FAILED, str(error))
