"""JobOutput: the type of the values that a handler may return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias, Union
from uuid import UUID

import msgspec


class DataclassOutput(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class PydanticModel(Protocol):
    """An instance of a pydantic model."""

    def model_dump_json(self) -> str:
        """Return the model as JSON text."""
        ...


JobOutput: TypeAlias = Union[  # noqa: UP007 (the strings of a recursive alias allow no `|`)
    bool,
    int,
    float,
    str,
    bytes,
    date,
    timedelta,
    Decimal,
    UUID,
    Enum,
    msgspec.Struct,
    DataclassOutput,
    PydanticModel,
    Sequence["JobOutput"],
    Mapping[str, object],
    Mapping[int, object],
    Mapping[UUID, object],
    None,
]
"""The values that a handler may return. The value is stored as JSON in the output of the job. None:
the job has no output. The items of lists, tuples and dicts must be such values too."""
