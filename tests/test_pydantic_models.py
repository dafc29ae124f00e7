"""Pydantic models as args and as output."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NotRequired,
    TypeVar,
)
from uuid import UUID

import msgspec
import pytest
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    Tag,
    computed_field,
    field_serializer,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypeAliasType, TypedDict  # pydantic needs these before Python 3.12

from riverpy import ArgsError, ConfigError, InsertOpts, Job, Unique, UniqueOpts, Workers, _json
from riverpy._insert.json_text import encode_args
from riverpy._insert.unique_key import find_unique_field_paths
from riverpy._json_decoder import make_decoder

if TYPE_CHECKING:
    from tests.work.rig import Rig

ItemT = TypeVar("ItemT")


@dataclass
class Place:
    """A dataclass inside a model."""

    city: str


class Size(msgspec.Struct):
    """A Struct inside a model would need a validator, so this one contains a model."""

    kind: ClassVar[str] = "size"
    inner: Line
    wait: timedelta = timedelta(0)


class Line(BaseModel):
    """A model inside others."""

    model_config = ConfigDict(frozen=True)
    unit_price: Decimal = Field(alias="unitPrice")
    due: datetime | None = None


class Cat(BaseModel):
    """A member of a union."""

    pet: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    """A member of a union."""

    pet: Literal["dog"] = "dog"
    wait: timedelta = timedelta(seconds=90)


class Box(TypedDict):
    """A TypedDict inside a model."""

    width: int
    height: NotRequired[int]


class Point(NamedTuple):
    """A NamedTuple inside a model."""

    x: int
    name: str


@pydantic_dataclass
class Parcel:
    """A dataclass of pydantic: stored like other dataclasses."""

    kind: ClassVar[str] = "parcel"
    width: Annotated[int, Field(ge=0)]
    wait: timedelta = timedelta(0)


class Page(BaseModel, Generic[ItemT]):
    """A generic model."""

    kind: ClassVar[str] = "page"
    items: list[ItemT]


class Order(BaseModel):
    """Args with most of what models have."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="forbid"
    )
    kind: ClassVar[str] = "order"
    order_id: Annotated[int, Unique]
    lines: list[Line] = Field(default_factory=list)
    pet: Cat | Dog = Field(default_factory=Cat, discriminator="pet")
    place: Place | None = None
    page: Page[int] | None = None
    raw: Json[list[int]] = Field(default_factory=list)
    data: bytes = b""
    note: Any = None
    ratio: float = 1.0
    id: UUID = UUID(int=1)

    @computed_field
    def size(self) -> int:
        """Computed, so not a part of the args."""
        return len(self.lines)

    @field_validator("ratio")
    @classmethod
    def check_ratio(cls, value: float) -> float:
        """Refuse a value."""
        if value < 0:
            raise ValueError("a ratio is not negative")
        return value


ORDER = Order(
    order_id=7,
    lines=[Line(unitPrice=Decimal("1.50"), due=datetime(2026, 1, 2, tzinfo=UTC))],
    pet=Dog(),
    place=Place("Ulm"),
    page=Page(items=[1, 2]),
    raw="[1]",  # type: ignore[arg-type]
    data=b"abc",
    note={"<b>": [1.5]},
)


def record_order(job: Job[Order]) -> None:
    """Work in a process of its own."""
    assert job.args == ORDER
    job.record_output(job.args)


async def test_args_and_output(rig: Rig) -> None:
    """A job gets the model that was inserted, in this process and in another one. Its output has
    the computed fields too. Marked fields are unique, by their aliases."""
    rig.job(args=Order, executor="process")(record_order)
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    first = await rig.insert(ORDER, unique)
    again = await rig.insert(ORDER.model_copy(update={"ratio": 3.0}), unique)
    assert again.job.id == first.job.id
    await rig.work_due_jobs()
    (row,) = await rig.schema.jobs()
    assert row["state"] == "completed", row["errors"]
    args = json.loads(row["args"]) if isinstance(row["args"], str) else row["args"]
    assert args["orderId"] == 7
    assert "size" not in args
    metadata = row["metadata"]
    output = (json.loads(metadata) if isinstance(metadata, str) else metadata)["output"]
    assert output["size"] == 1
    assert output["lines"] == [{"unitPrice": "1.50", "due": "2026-01-02T00:00:00Z"}]
    assert find_unique_field_paths(Order) == (("orderId",),)


def test_round_trip() -> None:
    """Models are decoded into an equal model: generic ones, frozen ones, strict ones, roots, and
    models inside a Struct, whose own durations are nanoseconds. Fields keep their order."""

    class Strict(BaseModel):
        model_config = ConfigDict(strict=True)
        kind: ClassVar[str] = "strict"
        at: datetime
        id: UUID
        fixed: Annotated[int, BeforeValidator(int)] = 1

    class Root(RootModel[dict[str, int]]):
        kind: ClassVar[str] = "root"

    class Mixed(BaseModel):
        model_config = ConfigDict(extra="forbid")
        kind: ClassVar[str] = "mixed"
        pet: Annotated[
            Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")],
            Discriminator(lambda pet: pet["pet"] if isinstance(pet, dict) else pet.pet),
        ]
        box: Box
        point: Point
        tree: Tree
        hidden: int = Field(default=1, exclude=True)

        @computed_field
        def wait(self) -> int:
            return 1

    mixed = Mixed(
        pet=Dog(),
        box={"width": 1},
        point=Point(1, "b"),
        tree=Tree(subTrees=[Tree(leafValue=1)]),
    )
    size = Size(Line(unitPrice=Decimal(2)), timedelta(seconds=2))
    models: list[Any] = [
        ORDER,
        Page[Line](items=[Line(unitPrice=Decimal(1))]),
        Strict(at=datetime.now(UTC), id=UUID(int=3)),
        Root({"b": 1, "a": 2}),
        size,
        mixed,
        Parcel(width=2, wait=timedelta(seconds=1)),
    ]
    for model in models:
        text = encode_args(model)
        assert make_decoder(type(model))(text) == model
    assert encode_args(size) == '{"inner":{"unitPrice":"2","due":null},"wait":2000000000}'
    assert list(json.loads(encode_args(ORDER)))[:2] == ["orderId", "lines"]
    assert _json.encode({"model": Cat()}) == '{"model":{"pet":"cat","lives":9}}'


class Loose(BaseModel):
    """Args that can have any value."""

    kind: ClassVar[str] = "loose"
    model_config = ConfigDict(extra="allow")
    value: Any = None
    number: Annotated[int, Field(ge=0)] = 0


class Tree(BaseModel):
    """A model with itself and any values inside it, by aliases."""

    model_config = ConfigDict(alias_generator=to_camel)
    kind: ClassVar[str] = "tree"
    leaf_value: Any = None
    sub_trees: list[Tree] = Field(default_factory=list)


class Written(BaseModel):
    """A field that is written in a form from which it cannot be read."""

    kind: ClassVar[str] = "written"
    number: int

    @field_serializer("number")
    def write_number(self, value: int) -> str:
        """Write the number."""
        return f"number {value}"


class WithComputed(msgspec.Struct):
    """A Struct whose model has a computed field that it does not accept."""

    kind: ClassVar[str] = "computed"
    order: Order


@pytest.mark.parametrize(
    ("args", "path", "reason"),
    [
        (Loose(value={"x": [1, float("nan")]}), "$.value.x[1]", "nan has no JSON form"),
        (Loose(value="a\0b"), "$.value", "NUL"),
        (Loose(value="a\udc80"), "$.value", "surrogate"),
        (Loose(value=b"\xff"), "$.value", "invalid utf-8"),
        (Loose(value=SecretStr("hidden")), "$.value", "a secret of pydantic"),
        (Loose(value=object()), "$.value", "Unable to serialize unknown type"),
        (Loose(more=[{"x": object()}]), "$.more[0].x", "Unable to serialize unknown type"),
        (
            Order(order_id=1, note=[Loose(value=(1, object()))]),
            "$.note[0].value[1]",
            "unknown type",
        ),
        (Tree(subTrees=[Tree(leafValue=SecretStr("hidden"))]), "$.subTrees[0].leafValue", "secret"),
        (RootModel[dict[str, Any]]({"a": object()}), "$.a", "Unable to serialize unknown type"),
        (Written(number=1), "$.number", "valid integer"),
        (Loose.model_construct(number=-1), "$.number", "greater than or equal to 0"),
        (Loose.model_construct(number="x"), "$.number", "valid integer"),
        (Order.model_construct(order_id=1, ratio=-1.0), "$.ratio", "a ratio is not negative"),
        (WithComputed(ORDER), "$.order", "Extra inputs are not permitted"),
        (RootModel[int](3), None, "must be a JSON object"),
    ],
    ids=range(16),
)
def test_refused_values(args: Any, path: str | None, reason: str) -> None:
    """A value that PostgreSQL cannot store, or that a worker could not decode, is refused at the
    insert, with its path. No secret is in the text."""
    with pytest.raises(ArgsError, match=reason) as raised:
        encode_args(args)
    assert path is None or raised.value.path == path
    assert "hidden" not in str(raised.value)


def _class_with(annotation: Any, field: Any = ..., **config: Any) -> type[BaseModel]:
    namespace = {
        "__module__": __name__,
        "__annotations__": {"kind": ClassVar[str], "value": annotation},
        "kind": "made",
        "model_config": ConfigDict(**config),
    }
    return type(BaseModel)(
        "Made", (BaseModel,), {**namespace, **({} if field is ... else {"value": field})}
    )


class _SecretTuple(NamedTuple):
    token: SecretStr


class _SecretDict(TypedDict):
    token: SecretStr


class _WithSecret(BaseModel):
    token: SecretBytes | None = None


@dataclass
class _PlaceWithSecret:
    token: SecretStr


@pytest.mark.parametrize(
    ("args_class", "reason"),
    [
        (_class_with(SecretStr), r"\$.value is a secret of pydantic"),
        (_class_with(list[_WithSecret]), r"\$.value.token is a secret of pydantic"),
        (_class_with(dict[str, _PlaceWithSecret]), r"\$.value.token is a secret of pydantic"),
        (_class_with(list[_SecretTuple]), r"\$.value.token is a secret of pydantic"),
        (_class_with(_SecretDict), r"\$.value.token is a secret of pydantic"),
        (_class_with(TypeAliasType("Token", SecretStr)), r"\$.value is a secret of pydantic"),
        (_class_with(Secret[int]), r"\$.value is a secret of pydantic"),
        (_class_with(int, Field(exclude=True)), r"\$.value: it is excluded from JSON"),
        (_class_with(int, Field(serialization_alias="a")), "written as 'a', but not read"),
        (_class_with(int, Field(validation_alias="a")), "written as 'value', but not read"),
        (
            _class_with(int, Field(alias="a"), validate_by_alias=False, validate_by_name=True),
            "written as 'a', but not read",
        ),
        (_class_with(socket.socket, arbitrary_types_allowed=True), r"\$.value: its type cannot"),
        (_class_with(Callable[[], int]), r"\$.value: its type cannot"),
        (type("Old", (BaseModelV1,), {"kind": "old", "__module__": __name__}), "pydantic 1"),
    ],
    ids=range(14),
)
def test_refused_classes(args_class: Any, reason: str) -> None:
    """A class whose jobs could never be decoded, or would lose a value, is refused at the
    registration and at the insert, with the reason."""

    async def work(job: Any) -> None:
        pass

    work.__annotations__ = {"job": Job[args_class], "return": None}
    with pytest.raises(ConfigError, match=reason):
        Workers().job(kind="made")(work)
    with pytest.raises(ArgsError, match=reason) as raised:
        encode_args(
            args_class.construct() if args_class.__name__ == "Old" else args_class.model_construct()
        )
    assert raised.value.path.startswith("$.value") is (reason != "pydantic 1")


@pytest.mark.parametrize("root", [list[int], int, Literal["a"]], ids=str)
def test_refused_roots(root: Any) -> None:
    """A RootModel whose values are never objects is refused at the registration of a worker. Inside
    a model it is accepted."""

    class Root(RootModel[root]):  # type: ignore[valid-type]
        pass

    async def work(job: Any) -> None:
        pass

    work.__annotations__ = {"job": Job[Root], "return": None}
    with pytest.raises(ConfigError, match="must be a JSON object, but its root is of type"):
        Workers().job(kind="made")(work)
    make_decoder(_class_with(Root))


def test_accepted_classes() -> None:
    """Types that a validator makes from JSON, optional types and aliases with choices are
    accepted."""
    from pydantic import AliasChoices

    for annotation, field in (
        (Annotated[socket.socket, BeforeValidator(lambda _value: socket.socket())], ...),
        (socket.socket | None, None),
        (int, Field(validation_alias=AliasChoices("value", "old"))),
    ):
        make_decoder(_class_with(annotation, field, arbitrary_types_allowed=True))
