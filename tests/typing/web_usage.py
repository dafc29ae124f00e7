"""Web applications of users. This never runs; pyright strict must accept it without a cast.

Each `pyright: ignore` marks a line that must be a type error; pyright reports an ignore without an
error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, TypedDict, assert_type

from fastapi import Depends, FastAPI
from litestar import Litestar
from starlette.applications import Starlette

import riverpy
import riverpy.web

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

client = riverpy.Client()


class OwnState(TypedDict):
    number: int


@asynccontextmanager
async def for_fastapi(app: FastAPI) -> AsyncGenerator[None]:
    yield


@asynccontextmanager
async def with_state(app: Starlette) -> AsyncGenerator[OwnState]:
    yield {"number": 1}


@asynccontextmanager
async def for_litestar(app: Litestar) -> AsyncGenerator[None]:
    yield


fastapi_app = FastAPI(lifespan=riverpy.web.lifespan(client, work=True, inner=for_fastapi))
starlette_app = Starlette(lifespan=riverpy.web.lifespan(client, inner=with_state))
plain_app = Starlette(lifespan=riverpy.web.lifespan(client))
litestar_app = Litestar(
    lifespan=[riverpy.web.lifespan(client), riverpy.web.lifespan(client, inner=for_litestar)],
    dependencies={"client": riverpy.web.litestar_client},
)
riverpy.web.lifespan(client, True)  # pyright: ignore[reportCallIssue]
riverpy.web.lifespan("postgres://localhost")  # pyright: ignore[reportArgumentType]


@fastapi_app.post("/")
async def route(client: Annotated[riverpy.Client, Depends(riverpy.web.client)]) -> None:
    assert_type(client, riverpy.Client)
