"""The args of the tests of the test kit, one class of each kind that riverpy knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import pydantic

from riverpy import InsertOpts


@dataclass
class Welcome:
    """Args as a dataclass, with options of the class."""

    kind: ClassVar[str] = "welcome"

    user_id: int
    name: str = ""

    def insert_opts(self) -> InsertOpts:
        return InsertOpts(queue="mail", max_attempts=7)


class Invoice(msgspec.Struct, rename="camel"):
    """Args as a Struct whose fields have other names in JSON."""

    kind: ClassVar[str] = "invoice"

    order_id: int
    queue: str = "none"


class Payload(dict[str, Any]):
    """Args as a dict."""

    kind: ClassVar[str] = "payload"


class Model(pydantic.BaseModel):
    """Args as a pydantic model."""

    kind: ClassVar[str] = "model"

    user_id: int
