"""Args classes with the fields of the Go structs that the vectors of unique keys were made from."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from riverpy.insert_opts import Unique

Mark = Unique


class Args(msgspec.Struct):
    """The base of the args, with their kind."""

    kind: ClassVar[str] = "vec_kind"


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


class Plain(Args):
    z: str = ""
    a: int = 0
    m: bool = False


class One(Args):
    customer_id: Annotated[int, Mark] = 0
    note: str = ""


class Two(Args):
    z: Annotated[str, Mark] = ""
    note: str = ""
    a: Annotated[int, Mark] = 0


class Omit(Args, omit_defaults=True):
    a: Annotated[str, Mark] = ""
    b: Annotated[str, Mark] = ""
    note: str = ""


class Nested(Args):
    name: Annotated[str, Mark] = ""
    addr: Address = msgspec.field(default_factory=Address)
    note: str = ""


class NestedPointer(Args):
    name: Annotated[str, Mark] = ""
    addr: Address | None = None


class Whole(Args):
    blob: Annotated[Blob, Mark] = msgspec.field(default_factory=Blob)
    note: str = ""


class WholeAndSub(Args):
    addr: Annotated[Address, Mark] = msgspec.field(default_factory=Address)


class Map(Args):
    m: Annotated[dict[str, Any], Mark] = msgspec.field(default_factory=dict)
    n: int = 0


class Slice(Args):
    l: Annotated[list[int] | None, Mark] = None  # noqa: E741 (the vector's name)
    n: int = 0


class NoJson(Args, rename="pascal"):
    customer: Annotated[str, Mark] = ""
    note: str = ""


class Emb(Embedded):
    q: Annotated[str, Mark] = ""


class Dot(Args):
    a_b: Annotated[str, Mark] = msgspec.field(default="", name="a.b")
    n: int = 0


class Float(Args):
    f: Annotated[float, Mark] = 0.0
    i: Annotated[int, Mark] = 0
    u: Annotated[int, Mark] = 0


class Pointer(Args):
    p: Annotated[str | None, Mark] = None
    n: int = 0


class Str(Args):
    s: Annotated[str, Mark] = ""


class Multi(Args):
    s: Annotated[str, "sequence", Unique()] = ""
    t: Annotated[str, "sequence"] = ""


class Num(Args):
    first: Annotated[str, Mark] = msgspec.field(default="", name="0")
    second: Annotated[str, Mark] = msgspec.field(default="", name="1")


class PlainNested(Args):
    o: Blob = msgspec.field(default_factory=Blob)
    m: dict[str, int] = msgspec.field(default_factory=dict)
    a: int = 0


STRUCTS: dict[str, type[msgspec.Struct]] = {
    "plain": Plain,
    "one": One,
    "two": Two,
    "omit": Omit,
    "nested": Nested,
    "nestedptr": NestedPointer,
    "whole": Whole,
    "wholeandsub": WholeAndSub,
    "map": Map,
    "slice": Slice,
    "nojson": NoJson,
    "emb": Emb,
    "dot": Dot,
    "float": Float,
    "ptr": Pointer,
    "str": Str,
    "multi": Multi,
    "num": Num,
    "plainnested": PlainNested,
}
