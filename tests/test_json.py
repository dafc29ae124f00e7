"""The JSON encoder: it writes the same text as Go, and refuses other values."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, Self
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riverpy import _json
from riverpy._json_decoder import make_decoder
from riverpy.errors import ArgsError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5)
)


class Huge(int):
    """A number with more digits than Python converts to text."""

    def __new__(cls) -> Self:
        return super().__new__(cls, 10**5000)

    def __str__(self) -> str:
        return "huge"


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


class Mixed(Enum):
    PAIR = (1, "b")


class Renamed(msgspec.Struct, rename="camel"):
    first_name: str
    b: int = msgspec.field(default=1, name="B-b")
    a: int | msgspec.UnsetType = msgspec.UNSET


class Sparse(msgspec.Struct, omit_defaults=True):
    text: str = "long enough not to be shared"
    number: float = 0.0
    items: list[int] = msgspec.field(default_factory=list)
    must: int = 1


class Tagged(msgspec.Struct, tag_field="type", tag="t<1>"):
    x: int = 1


class Row(msgspec.Struct, array_like=True):
    x: int = 1
    y: str = "s"


@dataclass
class Record:
    z: int = 1
    a: list[int] = field(default_factory=lambda: [2])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3"),
        (-0.0, "-0"),
        (1e20, "100000000000000000000"),
        (1e21, "1e+21"),
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (1.5e300, "1.5e+300"),
        (123456.789, "123456.789"),
        (9007199254740993, "9007199254740993"),
        ("<a>&\u2028\u2029", r'"\u003ca\u003e\u0026\u2028\u2029"'),
        ('\x00\x01\x1f\x7f\t\n\r\b\f"\\/é'[1:], '"\\u0001\\u001f\x7f\\t\\n\\r\\b\\f\\"\\\\/é"'),
        ({"b": 1, "a": {"d": 1, "c": 2}}, '{"a":{"c":2,"d":1},"b":1}'),
        ({"\U0001f600": 1, "\uffee": 2}, '{"\uffee":2,"\U0001f600":1}'),
        ({10: "x", 9: "y"}, '{"10":"x","9":"y"}'),
        ({Colour.RED: Size.BIG}, '{"red":3}'),
        (Mixed.PAIR, '[1,"b"]'),
        ((1, [2, (3,)]), "[1,[2,[3]]]"),
        (b"hi>?", '"aGk+Pw=="'),
        (bytearray(b"\0"), '"AA=="'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Decimal("1.50"), '"1.50"'),
        (timedelta(seconds=90), "90000000000"),
        (timedelta(microseconds=-1), "-1000"),
        (date(2026, 1, 2), '"2026-01-02"'),
        (datetime(2026, 1, 2, 3, 4, 5, 600000, UTC), '"2026-01-02T03:04:05.6Z"'),
        (datetime(1, 1, 1, tzinfo=UTC), '"0001-01-01T00:00:00Z"'),
        (
            datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
            '"2026-01-02T00:00:00-05:30"',
        ),
        (
            datetime(2026, 1, 2, 0, 53, 28, tzinfo=timezone(timedelta(minutes=53, seconds=28))),
            '"2026-01-02T00:00:00Z"',
        ),
        (Renamed("x"), '{"firstName":"x","B-b":1}'),
        (Renamed("x", 2, 3), '{"firstName":"x","B-b":2,"a":3}'),
        (Sparse("".join(["long enough not", " to be shared"])), "{}"),
        (Sparse(number=-0.0, items=[1]), '{"number":-0,"items":[1]}'),
        (Tagged(), r'{"type":"t\u003c1\u003e","x":1}'),
        (Row(), '[1,"s"]'),
        (Record(), '{"z":1,"a":[2]}'),
    ],
)
def test_text_equals_go(value: object, text: str) -> None:
    """Each type has its documented text (UQ-08, BI-09)."""
    assert _json.encode(value) == text


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ({"a": [1, {"b": math.nan}]}, "$.a[1].b", "nan"),
        ([math.inf], "$[0]", "inf"),
        ({"d": Decimal("NaN")}, "$.d", "NaN"),
        ({"a": {"x y": "a\0b"}}, "$.a['x y']", "NUL"),
        ({"k\0": 1}, "$['k\\x00']", "NUL"),
        ({"k": {"\udcff": 1}}, "$.k['\\udcff']", "U+DCFF"),
        ([["\ud800"]], "$[0][0]", "U+D800"),
        (10**309, "$", "range of a float"),
        ([Huge()], "$[0]", "range of a float"),
        ({Huge(): 1}, "$", "range of a float"),
        (Record(a=[1, {2}]), "$.a[1]", "sorted list"),  # pyright: ignore
        (Renamed(object()), "$.firstName", "object"),  # pyright: ignore
        ({"t": datetime(2026, 1, 1)}, "$.t", "time zone"),
        ({"f": print}, "$.f", "builtin_function"),
        ({1.5: 1}, "$", "key"),
        ({True: 1}, "$", "key"),
        ({1: 1, "1": 2}, "$", "same text"),
    ],
)
def test_refuses_what_cannot_be_stored(value: object, path: str, words: str) -> None:
    """The error has the place and the reason (BI-01, BI-03, BI-04, BI-09)."""
    with pytest.raises(ArgsError, match="^" + "\\" + path[:1]) as caught:
        _json.encode(value)
    assert caught.value.path == path
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_value_inside_itself_is_refused() -> None:
    """A value that contains itself, or is too deep, raises ArgsError and not RecursionError."""
    loop: list[Any] = []
    loop.append({"again": loop})
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    for value in (loop, deep):
        with pytest.raises(ArgsError, match="nested"):
            _json.encode(value)
    while deep:
        deep = deep.pop()


def test_depth_up_to_the_limit_is_written() -> None:
    """A value with exactly the maximum depth is encoded."""
    value: Any = 1
    for _ in range(_json.JSON_DEPTH_MAX):
        value = {"a": value}
    assert _json.compact_like_go(_json.encode(value)) == _json.encode(value)
    with pytest.raises(ArgsError, match="nested"):
        _json.encode([value])
    with pytest.raises(ArgsError, match="nested"):
        _json.compact_like_go(f"[{_json.encode(value)}]")


@given(VALUES)
def test_decodes_to_the_same_value(value: object) -> None:
    """Encoded values decode to the same values. A whole float becomes an int."""

    def same(read: Any, part: Any) -> bool:
        if isinstance(part, list):
            return len(read) == len(part) and all(map(same, read, part))
        if isinstance(part, dict):
            return read.keys() == part.keys() and all(same(read[key], part[key]) for key in part)
        if isinstance(part, float):
            return type(read) in {int, float} and float(read) == part
        return type(read) is type(part) and read == part

    assert same(json.loads(_json.encode(value)), value)


@given(VALUES)
def test_equal_values_give_equal_text(value: object) -> None:
    """The insertion order of a dict does not change the text (UQ-08)."""

    def rebuilt(part: Any) -> Any:
        if isinstance(part, dict):
            items: list[Any] = list(part.items())
            return {key: rebuilt(item) for key, item in reversed(items)}
        return list(map(rebuilt, part)) if isinstance(part, list) else part

    assert _json.encode(rebuilt(value)) == _json.encode(value)


@given(VALUES)
def test_normalizing_keeps_what_was_written(value: object) -> None:
    """Normalizing removes spaces from text in Go's form and changes nothing else."""
    text = _json.encode(value)
    assert _json.compact_like_go(text) == text
    spaced = json.dumps(json.loads(text, parse_float=str), indent=1, ensure_ascii=False)
    assert json.loads(_json.compact_like_go(spaced)) == json.loads(spaced)


@given(st.text())
def test_strings_are_written_or_refused(text: str) -> None:
    """A string with NUL or a lone surrogate is refused. Any other string decodes to itself."""
    is_bad = "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)
    try:
        written = _json.encode([text])
    except ArgsError:
        assert is_bad
    else:
        assert not is_bad
        assert json.loads(written) == [text]


@pytest.mark.parametrize(
    ("text", "compact"),
    [
        ('{ "b" : 1.0 , "a" : 1E+2 }', '{"b":1.0,"a":1E+2}'),
        ('{"a":1,"a":2}', '{"a":1,"a":2}'),
        ('{"a":"<\u2028>"}', r'{"a":"\u003c\u2028\u003e"}'),
        (r'{"a":"\\u0000"}', r'{"a":"\\u0000"}'),
        (r'{"a":"\\\\u0000"}', r'{"a":"\\\\u0000"}'),
        (r'{"a":"\ud83d\ude00"}', r'{"a":"\ud83d\ude00"}'),
        (r'{"a":"\/\u0061"}', r'{"a":"\/\u0061"}'),
        ("\t\r\n 1 ", "1"),
    ],
)
def test_raw_text_is_kept(text: str, compact: str) -> None:
    """Normalizing removes spaces and adds Go's escapes. It keeps the order, repeated keys and
    numbers."""
    assert _json.compact_like_go(text) == compact


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{'a':1}",
        '{"a":1,}',
        '{"a":01}',
        '{"a":.5}',
        '{"a":+1}',
        '{"a":NaN}',
        '{"a":-Infinity}',
        '{"a":1}{}',
        '{"a":"\n"}',
        '{"a":"\\x"}',
        '{"a":1e400}',
        '{"a":' + "9" * 5000 + "}",
        r'{"a":"\u0000"}',
        r'{"\u0000":1}',
        r'{"a":"\\\u0000"}',
        r'{"a":"\ud800"}',
        r'{"a":"\ud83d\ud83d\ude00"}',
        r'{"a":"\udE00"}',
        r'{"a":"\ud83dx\ude00"}',
        '{"a":"\ud800"}',
        '{"a":"\0"}',
        "\ufeff{}",
        "[" * 100_000,
        "[" * 300 + "]" * 300,
    ],
)
def test_raw_text_is_refused(text: str) -> None:
    """Only strict JSON that PostgreSQL can store is accepted (BI-01, BI-03, BI-04)."""
    with pytest.raises(ArgsError):
        _json.compact_like_go(text)


class Inner(msgspec.Struct, tag=True):
    wait: timedelta | None = None


class Other(msgspec.Struct, tag=True):
    wait: int = 0


class Row(msgspec.Struct, tag=True, array_like=True):
    wait: timedelta


@dataclass
class Everything:
    at: datetime
    day: date
    wait: timedelta
    price: Decimal
    key: UUID
    blob: bytes
    colour: Colour
    size: Size
    pair: tuple[int, timedelta]
    waits: list[timedelta]
    named: dict[str, timedelta]
    numbers: dict[int, int]
    big: int
    ratio: float
    either: list[Inner | Other]
    row: Row
    again: Everything | None = None


def everything() -> Everything:
    return Everything(
        at=datetime(2026, 1, 2, 3, 4, 5, 60, UTC),
        day=date(2026, 1, 2),
        wait=timedelta(days=400, microseconds=1),
        price=Decimal("1.50"),
        key=UUID(int=7),
        blob=b"\0\xff",
        colour=Colour.RED,
        size=Size.BIG,
        pair=(1, timedelta(-1)),
        waits=[timedelta(seconds=90), timedelta(0)],
        named={"a": timedelta(milliseconds=1)},
        numbers={2: 1, 10: 2},
        big=2**63 - 1,
        ratio=3.0,
        either=[Inner(timedelta(1)), Inner(), Other(5)],
        row=Row(timedelta(seconds=2)),
    )


def test_args_come_back_as_they_were() -> None:
    """Values of common types reach a typed worker unchanged (BI-09)."""
    args = everything()
    args.again = everything()
    decode = make_decoder(Everything)
    read = decode(_json.encode(args))
    assert read == args
    assert type(read.ratio) is float
    with pytest.raises(msgspec.ValidationError, match=r"\$\.wait"):
        decode(_json.encode(args).replace('"wait":34560000000001000', '"wait":"soon"', 1))
    with pytest.raises(msgspec.ValidationError, match=r"\$\.wait"):
        decode(_json.encode(args).replace('"wait":34560000000001000', f'"wait":{10**30}', 1))


def test_text_does_not_depend_on_the_hash_seed() -> None:
    """PYTHONHASHSEED does not change the text (UQ-08)."""
    code = (
        "from riverpy import _json;"
        "print(_json.encode({k: {k + x: 1 for x in 'zyx'} for k in 'qwertyuiop'}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert len(texts) == 1
