"""Args classes with the fields of the Go structs that the vectors of unique keys were made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import msgspec

from riverpy.insert_opts import Unique

Mark = Unique
STRUCTS: dict[str, type[msgspec.Struct]] = {}


class Args(msgspec.Struct):
    """The kind of all of them."""

    kind: ClassVar[str] = "vec_kind"


def named(name: str) -> Callable[[type[Any]], type[Any]]:
    def add(cls: type[Any]) -> type[Any]:
        STRUCTS[name] = cls
        return cls

    return add


class Address(msgspec.Struct):
    street: str = ""
    zip: Annotated[str, Mark] = ""
    city: Annotated[str, Mark] = ""


class Blob(msgspec.Struct):
    y: int = 0
    x: str = ""


class Embedded(Args):
    e1: Annotated[str, Mark] = ""
    e2: str = ""


@named("plain")
class Plain(Args):
    z: str = ""
    a: int = 0
    m: bool = False


@named("one")
class One(Args):
    customer_id: Annotated[int, Mark] = 0
    note: str = ""


@named("two")
class Two(Args):
    z: Annotated[str, Mark] = ""
    note: str = ""
    a: Annotated[int, Mark] = 0


@named("omit")
class Omit(Args, omit_defaults=True):
    a: Annotated[str, Mark] = ""
    b: Annotated[str, Mark] = ""
    note: str = ""


@named("nested")
class Nested(Args):
    name: Annotated[str, Mark] = ""
    addr: Address = msgspec.field(default_factory=Address)
    note: str = ""


@named("nestedptr")
class NestedPointer(Args):
    name: Annotated[str, Mark] = ""
    addr: Address | None = None


@named("whole")
class Whole(Args):
    blob: Annotated[Blob, Mark] = msgspec.field(default_factory=Blob)
    note: str = ""


@named("wholeandsub")
class WholeAndSub(Args):
    addr: Annotated[Address, Mark] = msgspec.field(default_factory=Address)


@named("map")
class Map(Args):
    m: Annotated[dict[str, Any], Mark] = msgspec.field(default_factory=dict)
    n: int = 0


@named("slice")
class Slice(Args):
    l: Annotated[list[int] | None, Mark] = None  # noqa: E741 (the vector's name)
    n: int = 0


@named("nojson")
class NoJson(Args, rename="pascal"):
    customer: Annotated[str, Mark] = ""
    note: str = ""


@named("emb")
class Emb(Embedded):
    q: Annotated[str, Mark] = ""


@named("dot")
class Dot(Args):
    a_b: Annotated[str, Mark] = msgspec.field(default="", name="a.b")
    n: int = 0


@named("float")
class Float(Args):
    f: Annotated[float, Mark] = 0.0
    i: Annotated[int, Mark] = 0
    u: Annotated[int, Mark] = 0


@named("ptr")
class Pointer(Args):
    p: Annotated[str | None, Mark] = None
    n: int = 0


@named("str")
class Str(Args):
    s: Annotated[str, Mark] = ""


@named("multi")
class Multi(Args):
    s: Annotated[str, "sequence", Unique()] = ""
    t: Annotated[str, "sequence"] = ""


@named("num")
class Num(Args):
    first: Annotated[str, Mark] = msgspec.field(default="", name="0")
    second: Annotated[str, Mark] = msgspec.field(default="", name="1")


@named("plainnested")
class PlainNested(Args):
    o: Blob = msgspec.field(default_factory=Blob)
    m: dict[str, int] = msgspec.field(default_factory=dict)
    a: int = 0
