"""Endpoint: one path of the JSON API, with the types of its input and its answer.

The types are the only description of an endpoint. They validate the input, encode the answer, and
define the OpenAPI document.
"""

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
    """The input of an endpoint without parameters."""


class SuccessAnswer(msgspec.Struct):
    """The answer to a request that succeeded."""

    status: Annotated[str, msgspec.Meta(description="Always `ok`.")] = "ok"


class ErrorAnswer(msgspec.Struct):
    """The answer to a request that was refused or failed, with the reason."""

    message: Annotated[str, msgspec.Meta(description="A text for people.")]


class ApiCall(NamedTuple):
    """The dashboard, and the rights of the user who sent a request."""

    site: Site
    access: Access


@dataclass(frozen=True)
class Endpoint(Generic[InputT]):
    """One method and path of the JSON API, with the function that answers the request."""

    method: str
    path: str
    """The path below `/api`, as a Starlette route."""
    summary: str
    input: type[InputT]
    """The type of the input. Its fields are the path parameters and, for GET, the query parameters.
    For other methods they are the path parameters and the members of the JSON body."""
    answer: type[msgspec.Struct]
    respond: Callable[[ApiCall, InputT], Awaitable[msgspec.Struct]]
    """The function that returns the answer. It raises HTTPException to refuse the request.
    ConfigError and ArgsError become status 400, NotFoundError becomes status 404."""
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """The error statuses that the OpenAPI document lists for this endpoint, with their reasons."""
