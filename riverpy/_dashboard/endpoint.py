"""Endpoint: one address of the JSON API, with the types of its input and its answer.

The types are the only description of an endpoint. They check the input, they encode the answer, and
the OpenAPI document is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.site import Site

InputT = TypeVar("InputT", bound=msgspec.Struct)


class NoInput(msgspec.Struct):
    """The input of an endpoint that has none."""


class StatusAnswer(msgspec.Struct):
    """What was asked for is done, or is as it should be."""

    status: Annotated[str, msgspec.Meta(description="Always `ok`.")] = "ok"


class ErrorAnswer(msgspec.Struct):
    """Why a request was refused or failed."""

    message: Annotated[str, msgspec.Meta(description="A text for people.")]


class ApiCall(NamedTuple):
    """One call of an endpoint: the dashboard, and the rights of the caller."""

    site: Site
    access: Access


@dataclass(frozen=True)
class Endpoint(Generic[InputT]):
    """An address of the API."""

    method: str
    path: str
    """The path below `/api`, in the form of Starlette's routes."""
    summary: str
    input: type[InputT]
    """The parameters of the path, and those of the query (GET) or the members of the body."""
    answer: type[msgspec.Struct]
    respond: Callable[[ApiCall, InputT], Awaitable[msgspec.Struct]]
    """Return the answer. Raise HTTPException for an error of the caller. ConfigError and ArgsError
    become the status 400, NotFoundError becomes 404."""
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """The statuses of errors that are special to this endpoint, with their reasons."""
