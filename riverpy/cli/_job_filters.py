"""Command options that select jobs with filters."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, TypeVar, cast

import click
import msgspec

from riverpy.cli._types import NONEMPTY_TEXT_TYPE, IntegerType, ParsedType
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from riverpy.job_list import JobFilters

ResultT = TypeVar("ResultT")

JOB_ID_TYPE = IntegerType(1, 2**63 - 1)


def _parse_json_object(text: str) -> Mapping[str, object]:
    """Parse a text as a JSON object. Raise ValueError if it is not one."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise ValueError(
            f"{text[:80]!a} is not a JSON object, such as '{{\"tenant\": 7}}'"
        ) from None


_FILTER_OPTIONS = (
    ("kind", "kinds", NONEMPTY_TEXT_TYPE, "of this kind. An index serves this filter."),
    (
        "state",
        "states",
        click.Choice([*map(str, JobState)]),
        "in this state. An index serves this filter.",
    ),
    ("queue", "queues", NONEMPTY_TEXT_TYPE, "in this queue."),
    ("priority", "priorities", IntegerType(1, 4), "with this priority."),
    ("tag", "tags_all", NONEMPTY_TEXT_TYPE, "with this tag. Repeated: with all of these tags."),
    (
        "any-tag",
        "tags_any",
        NONEMPTY_TEXT_TYPE,
        "with this tag. Repeated: with at least one of these tags.",
    ),
)
_METADATA_HELP = (
    "Only jobs whose metadata contain the keys and values of this JSON object. An index serves "
    "this filter."
)
_ERROR_HELP = "Only jobs whose last error contains this text. Case matters."

job_ids_option = click.option(
    "--id",
    "ids",
    type=JOB_ID_TYPE,
    multiple=True,
    help="Only the job with this id. Can be repeated.",
)


def job_filter_options(command: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Decorate a command with the options that select jobs, such as `--kind`. The parameter
    `filters` of the command function receives a dict. It contains the values of those options that
    the user has given."""
    names = [one[1] for one in _FILTER_OPTIONS]

    @wraps(command)
    def call_with_filters(*args: object, **kwargs: object) -> ResultT:
        given = {name: kwargs.pop(name) for name in (*names, "metadata", "error")}
        filters = {name: value for name, value in given.items() if value not in ((), None)}
        return command(*args, filters=cast("JobFilters", filters), **kwargs)

    decorated: Callable[..., ResultT] = call_with_filters
    decorated = click.option("--error", type=NONEMPTY_TEXT_TYPE, metavar="TEXT", help=_ERROR_HELP)(
        decorated
    )
    decorated = click.option(
        "--metadata",
        type=ParsedType("object", _parse_json_object),
        metavar="JSON",
        help=_METADATA_HELP,
    )(decorated)
    for flag, name, kind, text in reversed(_FILTER_OPTIONS):
        is_tag = name.startswith("tags")
        text = f"Only jobs {text}" + ("" if is_tag else " Can be repeated.")
        decorated = click.option(f"--{flag}", name, type=kind, multiple=True, help=text)(decorated)
    return decorated


def describe_filters(filters: JobFilters) -> str:
    """Return a text about the filters for the confirmation question."""
    names = {one[1]: one[0].replace("-", " ") for one in _FILTER_OPTIONS}
    parts: list[str] = []
    for name, value in filters.items():
        if name in names:
            parts.append(f"{names[name]} {', '.join(map(str, cast('tuple[object, ...]', value)))}")
        elif name == "ids":
            parts.append("given by id")
        else:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            parts.append(f"{name} {text}")
    return "; ".join(parts)
