"""The args that tests insert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from riverpy.insert_opts import InsertManyParams, InsertOpts, Unique, UniqueOpts

if TYPE_CHECKING:
    from riverpy.job import JobState

BY_ARGS = InsertOpts(unique_opts=UniqueOpts(by_args=True))


OWN = InsertOpts(
    max_attempts=3,
    metadata={"never": "used"},
    pending=True,
    priority=2,
    queue="own",
    tags=["own-tag"],
    unique_opts=UniqueOpts(by_queue=True),
)


class Welcome(msgspec.Struct, frozen=True):
    """Args with one field that is marked Unique."""

    kind: ClassVar[str] = "welcome"

    user_id: Annotated[int, Unique]
    note: str = ""


class Data(dict[str, Any]):
    """Args that are a dict."""

    kind: ClassVar[str] = "data"


class Choosy(msgspec.Struct):
    """Args with their own options."""

    kind: ClassVar[str] = "choosy"

    def insert_opts(self) -> InsertOpts:
        """Return the same object each time."""
        return OWN


def many(*args: Any, opts: InsertOpts | None = None) -> list[InsertManyParams]:
    """Make the params of `insert_many` for these args, with the same options."""
    return [InsertManyParams(one, opts) for one in args]


def by_states(*states: JobState) -> InsertOpts:
    """Options: unique by args in these states."""
    return InsertOpts(unique_opts=UniqueOpts(by_args=True, by_state=states))
