"""The args that the tests insert."""

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
    """One marked field."""

    kind: ClassVar[str] = "welcome"

    user_id: Annotated[int, Unique]
    note: str = ""


class Data(dict[str, Any]):
    """A dict as args."""

    kind: ClassVar[str] = "data"


class Choosy(msgspec.Struct):
    """Args with options of their own."""

    kind: ClassVar[str] = "choosy"

    def insert_opts(self) -> InsertOpts:
        """Always the same object."""
        return OWN


def many(*args: Any, opts: InsertOpts | None = None) -> list[InsertManyParams]:
    """The params of `insert_many` for these args, with the same options."""
    return [InsertManyParams(one, opts) for one in args]


def by_states(*states: JobState) -> InsertOpts:
    """Unique by args in these states."""
    return InsertOpts(unique_opts=UniqueOpts(by_args=True, by_state=states))
