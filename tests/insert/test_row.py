"""Args and options that are refused before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import asyncpg
import msgspec
import pytest

from riverpy import _json
from riverpy._insert import inserter as _insert
from riverpy._insert.errors import translate_insert_errors
from riverpy._insert.row import InsertSettings, prepare_row
from riverpy._json_decoder import make_decoder
from riverpy.errors import (
    ArgsError,
    ConfigError,
    InsertError,
    SchemaMissingError,
    UnknownJobKindError,
)
from riverpy.insert_opts import (
    UNIQUE_STATES_REQUIRED,
    InsertManyParams,
    InsertOpts,
    UniqueOpts,
)
from riverpy.job import RawArgs
from tests.insert.conftest import inserter_on
from tests.insert.jobs import Data, Welcome, many

if TYPE_CHECKING:
    from riverpy._insert.inserter import Inserter
    from tests._database import Schema

NOW = datetime(2026, 3, 15, tzinfo=UTC)
RULES = InsertSettings(default_max_attempts=25)


def loose(**values: Any) -> InsertOpts:
    """Make options that a type checker would refuse."""
    return InsertOpts(**values)


def loose_raw(kind: Any, json: Any) -> RawArgs:
    """Make raw args that a type checker would refuse."""
    return RawArgs(kind, json)


def loose_value(value: object) -> Any:
    """Return a value that a type checker would refuse."""
    return value


def unique(**values: Any) -> InsertOpts:
    return InsertOpts(unique_opts=UniqueOpts(**values))


@dataclass
class NoKind:
    x: int = 1


@dataclass
class KindField:
    kind: str
    x: int = 1


def changed_to_odd(args: Even) -> Even:
    args.n += 1
    return args


class BadOpts(Data):
    def insert_opts(self) -> Any:
        return {"queue": "x"}


class Number(int):
    """A number class that has no JSON form."""


@dataclass
class Typed:
    kind: ClassVar[str] = "typed"
    n: int
    at: datetime | None = None
    delay: timedelta | None = None
    points: tuple[Point, ...] = ()


class Point(NamedTuple):
    x: float
    wait: timedelta = timedelta(0)


class Even(msgspec.Struct):
    kind: ClassVar[str] = "even"
    n: int

    def __post_init__(self) -> None:
        if self.n % 2:
            raise ValueError("n must be even")


class Custom(msgspec.Struct):
    kind: ClassVar[str] = "custom"
    numbers: list[Number] = []


@dataclass
class Untagged:
    kind: ClassVar[str] = "untagged"
    either: Even | Welcome


class ArgsList(list[int]):
    kind: ClassVar[str] = "list_args"


ARGS: list[tuple[Any, type[Exception], str]] = [
    (Data(x=object()), ArgsError, r"^\$\.x: an instance of object has no JSON form"),
    (Data(x=[math.nan]), ArgsError, r"^\$\.x\[0\]: nan"),
    (Data(x=-math.inf), ArgsError, r"^\$\.x: -inf"),
    (Data(x=Decimal("NaN")), ArgsError, r"^\$\.x: the Decimal NaN"),
    (Data(x=["a", ["\0"]]), ArgsError, r"^\$\.x\[1\]\[0\]: .* NUL"),
    (Data({"a\0": 1}), ArgsError, r"^\$\['a\\x00'\]: .* NUL"),
    (Data(x="\ud800"), ArgsError, r"^\$\.x: .* lone surrogate U\+D800"),
    (Data(x=10**400), ArgsError, r"^\$\.x: the integer is beyond the range of a float"),
    (Data(x=datetime(2026, 1, 1)), ArgsError, r"^\$\.x: the datetime has no time zone"),
    (Data(x={1}), ArgsError, r"^\$\.x: a set has no order"),
    (
        Welcome(loose_value("one")),
        ArgsError,
        r"^\$\.user_id: Expected `int`, got `str`; .* Welcome$",
    ),
    (Typed(loose_value("1")), ArgsError, r"^\$\.n: Expected `int`, got `str`; .* Typed$"),
    (Typed(loose_value(None)), ArgsError, r"^\$\.n: Expected `int`, got `null`"),
    (Typed(1, loose_value("soon")), ArgsError, r"^\$\.at: Invalid RFC3339 encoded datetime"),
    (Typed(1, delay=loose_value("1h")), ArgsError, r"^\$\.delay: "),
    (Typed(1, points=loose_value([(1, timedelta(1)), "x"])), ArgsError, r"^\$\.points\[1\]: Exp"),
    (changed_to_odd(Even(2)), ArgsError, r"^\$: n must be even; .* Even$"),
    (Custom(), ArgsError, r"Custom can never be decoded: \$\.numbers\[\.\.\.\]: the type Number "),
    (Untagged(Welcome(1)), ArgsError, r"Untagged can never be decoded: \$\.either: .*tagged"),
    (ArgsList([1]), ArgsError, "must be a JSON object"),
    (RawArgs("raw", "[1]"), ArgsError, "must be a JSON object"),
    (RawArgs("raw", '"x"'), ArgsError, "must be a JSON object"),
    (RawArgs("raw", "{'a': 1}"), ArgsError, "is not JSON"),
    (RawArgs("raw", r'{"a": "\u0000"}'), ArgsError, "NUL"),
    (RawArgs("raw", '{"a": "\ud800"}'), ArgsError, r"^\$: .* lone surrogate U\+D800 at index 7"),
    (RawArgs("raw", '{"é\udcff": 1}'), ArgsError, r"^\$: .* lone surrogate U\+DCFF"),
    (loose_raw("raw", b"{}"), ArgsError, r"^\$: RawArgs takes its JSON as a text, got bytes"),
    (loose_raw("raw", None), ArgsError, r"^\$: RawArgs takes its JSON as a text, got NoneType"),
    (loose_raw("raw", {"a": 1}), ArgsError, r"^\$: RawArgs takes its JSON as a text, got dict"),
    (loose_raw(None, "{}"), InsertError, "the kind of RawArgs must be str, got NoneType"),
    (RawArgs("raw\ud800", "{}"), ConfigError, "job kind must start with"),
    (Welcome, InsertError, "must be an object, got the class Welcome: call it"),
    (RawArgs("", "{}"), ConfigError, "kind must not be empty"),
    (RawArgs("x", "{}"), ConfigError, "job kind must start with"),
    (RawArgs("a\0b", "{}"), ConfigError, "job kind must start with"),
    (RawArgs("bad kind", "{}"), ConfigError, "job kind must start with"),
    (RawArgs("kind\n", "{}"), ConfigError, "job kind must start with"),
    (RawArgs("k" * 128, "{}"), ConfigError, "at most 127 characters, got 128"),
    (NoKind(), InsertError, r"NoKind has no kind: .*ClassVar"),
    (KindField("x"), InsertError, "KindField has no kind"),
    (BadOpts(), InsertError, r"BadOpts\.insert_opts must be InsertOpts, got dict"),
]
OPTS: list[tuple[Any, type[Exception], str]] = [
    *((InsertOpts(priority=n), InsertError, f"priority must be .* got {n}") for n in (0, 5, 99999)),
    *(
        (InsertOpts(max_attempts=n), InsertError, f"max_attempts must be .* got {n}")
        for n in (0, -1, 32768, 40000)
    ),
    (loose(priority="1"), InsertError, "priority must be int, got str"),
    (loose(priority=True), InsertError, "priority must be int, got bool"),
    *(
        (InsertOpts(queue=queue), ConfigError, "queue name")
        for queue in ("", "Default", "a__b", "default\n", "-a", "a-", "a b", "q\0", "é", "q" * 65)
    ),
    ({"queue": "a"}, InsertError, "opts must be InsertOpts, got dict"),
    ({}, InsertError, "opts must be InsertOpts, got dict"),
    ("a", InsertError, "opts must be InsertOpts, got str"),
    (UniqueOpts(by_args=True), InsertError, "opts must be InsertOpts, got UniqueOpts"),
    (loose(pending="yes"), InsertError, "pending must be bool, got str"),
    (loose(pending=None), InsertError, "pending must be bool, got NoneType"),
    *(
        (unique(**{"by_queue": True, name: value}), InsertError, f"{name} must be bool, got {got}")
        for name in ("by_args", "by_queue", "exclude_kind")
        for value, got in (("yes", "str"), (1, "int"), (None, "NoneType"))
    ),
    (loose(queue=b"x"), InsertError, "queue must be str, got bytes"),
    *(
        (InsertOpts(tags=["good", tag]), ConfigError, "tag")
        for tag in ("ab", "", "-ab", "ab-", "a,b", "a b", "tägé", "tag\n", "t\0g", "t" * 256, "a.b")
    ),
    (loose(tags="abc"), InsertError, "tags must be a sequence of strings, got the string 'abc'"),
    (loose(tags=[1]), InsertError, "a tag must be str, got int"),
    (loose(tags={"abc"}), InsertError, "tags must be Sequence, got set"),
    (loose(metadata=[1]), ArgsError, "metadata: must be a JSON object, got list"),
    (loose(metadata="{}"), ArgsError, "metadata: must be a JSON object, got str"),
    (InsertOpts(metadata={"cancel_attempted_at": "soon"}), ArgsError, "belongs to River"),
    (InsertOpts(metadata={"CANCEL_attempted_at": None}), ArgsError, "belongs to River"),
    (InsertOpts(metadata={"river:reſcue_count": 1}), ArgsError, "belongs to River"),
    (InsertOpts(metadata={"a": "\0"}), ArgsError, r"^metadata\.a: .* NUL"),
    (InsertOpts(metadata={"a": [math.nan]}), ArgsError, r"^metadata\.a\[0\]: nan"),
    (InsertOpts(scheduled_at=datetime(2027, 1, 1)), InsertError, "scheduled_at has no time zone"),
    (
        InsertOpts(scheduled_at=datetime.max.replace(tzinfo=timezone(timedelta(hours=-8)))),
        InsertError,
        "outside the years 1 to 9999 in UTC",
    ),
    (
        InsertOpts(scheduled_at=datetime.min.replace(tzinfo=timezone(timedelta(hours=8)))),
        InsertError,
        "outside the years 1 to 9999 in UTC",
    ),
    (loose(scheduled_at=timedelta(hours=1)), InsertError, "scheduled_at must be datetime"),
    (loose(unique_opts={"by_args": True}), InsertError, "unique_opts must be UniqueOpts, got dict"),
    (unique(by_period=30), InsertError, "by_period must be timedelta, got int"),
    (unique(by_period=timedelta(milliseconds=999)), InsertError, "one second or longer"),
    (unique(by_period=timedelta(0)), InsertError, "one second or longer, got 0:00:00"),
    (unique(by_period=timedelta(seconds=-5)), InsertError, "one second or longer"),
    *(
        (unique(exclude_kind=True, **more), InsertError, "requires by_args, by_queue or by_period")
        for more in ({}, {"by_state": UNIQUE_STATES_REQUIRED})
    ),
    (unique(by_state=[]), InsertError, "missing: available, pending, running, scheduled"),
    (unique(by_state=["available", "gone"]), InsertError, "gone"),
]


@pytest.mark.parametrize(("args", "error", "words"), ARGS, ids=range(len(ARGS)))
async def test_bad_args_are_refused(
    inserter: Inserter, schema: Schema, args: Any, error: type[Exception], words: str
) -> None:
    """Wrong args raise an error with the place, and leave the transaction usable (BI-01, BI-03,
    BI-04, BI-09)."""
    await is_refused(inserter, schema, InsertManyParams(args), error, words)


def test_values_of_the_right_type_are_accepted() -> None:
    """Values that a worker can decode are accepted, including durations in tuples."""
    args = Typed(10**30, NOW, timedelta(days=1), (Point(1, timedelta(hours=1)), Point(0.5)))
    text = prepare_row(args, None, settings=RULES, now=NOW).args
    assert make_decoder(Typed)(text) == args


@pytest.mark.parametrize(("opts", "error", "words"), OPTS, ids=range(len(OPTS)))
async def test_bad_options_are_refused(
    inserter: Inserter, schema: Schema, opts: Any, error: type[Exception], words: str
) -> None:
    """Wrong options raise an error that says what is allowed, and leave the transaction usable
    (BI-01, BI-05, BI-10)."""
    await is_refused(inserter, schema, InsertManyParams(Welcome(1), opts), error, words)


async def is_refused(
    inserter: Inserter,
    schema: Schema,
    bad: InsertManyParams,
    error: type[Exception],
    words: str,
) -> None:
    assert issubclass(error, ValueError)
    async with schema.connected() as tx, tx.transaction():
        sent: list[Any] = []
        tx.add_query_logger(sent.append)
        with pytest.raises(error, match=words):
            await inserter.insert(bad.args, bad.opts, tx=tx)
        for send in (inserter.insert_many, inserter.insert_many_fast):
            with pytest.raises(error, match=words):
                await send([*many(Welcome(1)), bad], tx=tx)
        assert not sent
        assert await tx.fetchval("SELECT 1") == 1
    assert not await schema.jobs()


@pytest.mark.parametrize(
    ("queue", "tag"),
    [
        ("a", "abc"),
        ("a|b", "a_c"),
        ("a_b-c", "A-9"),
        ("0", "___"),
        ("q" * 64, "t" * 255),
        ("default", "NULL"),
    ],
)
async def test_good_names_are_accepted(inserter: Inserter, queue: str, tag: str) -> None:
    """Names that River allows are stored unchanged (BI-05)."""
    opts = InsertOpts(queue=queue, tags=[tag] * 300)
    job = (await inserter.insert(RawArgs("K·[a]<b>/.:+-", "{}"), opts, tx=None)).job
    assert (job.queue, job.tags, job.kind) == (queue, [tag] * 300, "K·[a]<b>/.:+-")


def test_long_bad_names_are_refused_in_linear_time() -> None:
    """Long wrong names are refused in linear time (BI-05)."""
    for queue in ("a" * 63 + "!", "a-" * 31 + "!"):
        with pytest.raises(ConfigError):
            prepare_row(Welcome(1), InsertOpts(queue=queue), settings=RULES, now=NOW)
    for name in ("a" * 10_000_000, "a_" * 5_000_000):
        with pytest.raises(ConfigError, match="at most 64 characters"):
            prepare_row(Welcome(1), InsertOpts(queue=name), settings=RULES, now=NOW)


def test_unknown_kinds_are_refused_by_a_client_with_workers() -> None:
    """A client with workers refuses an unknown kind, and the error says what to do. Without workers
    every kind is allowed."""
    rules = InsertSettings(default_max_attempts=25, known_kinds={"data"})
    assert prepare_row(Data(), None, settings=rules, now=NOW).kind == "data"
    with pytest.raises(UnknownJobKindError, match="'welcome'") as caught:
        prepare_row(Welcome(1), None, settings=rules, now=NOW)
    assert caught.value.kind == "welcome"
    assert prepare_row(Welcome(1), None, settings=RULES, now=NOW).kind == "welcome"


def test_skip_job_kind_validation() -> None:
    """With skip_job_kind_validation, only the limits of the table apply to kinds."""
    rules = InsertSettings(default_max_attempts=25, skip_job_kind_validation=True)
    assert prepare_row(RawArgs("a kind!", "{}"), None, settings=rules, now=NOW).kind == "a kind!"
    for kind in ("", "k" * 128, "k\0"):
        with pytest.raises(InsertError):
            prepare_row(RawArgs(kind, "{}"), None, settings=rules, now=NOW)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([Welcome(1), Welcome(2)], r"params\[0\] must be InsertManyParams\(args, opts\), got Wel"),
        ([*many(Welcome(1)), Welcome], r"params\[1\] must be .*, got the class Welcome"),
        ([*many(Welcome(1)), (Welcome(2), None)], r"params\[1\] must be .*, got tuple"),
        (Data(x=1), r"params\[0\] must be .*, got str"),
        (Welcome(1), "must be a list of InsertManyParams, got Welcome"),
        (InsertManyParams(Welcome(1)), "must be a list of InsertManyParams, got InsertManyParams"),
        (None, "must be a list of InsertManyParams, got NoneType"),
    ],
)
async def test_batches_of_other_types_are_refused(
    inserter: Inserter, schema: Schema, params: Any, words: str
) -> None:
    """A batch that is not a list of InsertManyParams raises an error with the right form
    (BI-01)."""
    for send in (inserter.insert_many, inserter.insert_many_fast):
        with pytest.raises(InsertError, match=words):
            await send(params, tx=None)
    assert not await schema.jobs()


async def test_an_empty_batch_is_refused(inserter: Inserter) -> None:
    """An empty batch raises an error, as in River."""
    for send in (inserter.insert_many, inserter.insert_many_fast):
        with pytest.raises(InsertError, match="nothing to insert"):
            await send([], tx=None)


def test_args_that_jsonb_cannot_hold_are_refused() -> None:
    """Args of 300 MB are refused with their size, before anything is sent (BI-07)."""
    text = "x" * 300_000_000
    assert _json.JSON_SIZE_MAX == 267_386_880
    with pytest.raises(ArgsError, match=r"\$\.x: the text has 300,000,000 char.* 267,386,880"):
        prepare_row(Data(x=text), None, settings=RULES, now=NOW)
    with pytest.raises(ArgsError, match=r"the args have 300,000,000 bytes as JSON"):
        prepare_row(RawArgs("raw", text), None, settings=RULES, now=NOW)


def test_size_limit_counts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is in bytes and also applies to metadata (BI-07)."""
    monkeypatch.setattr(_json, "JSON_SIZE_MAX", 1000)
    for letter, fitting in (("x", 992), ("é", 496)):
        prepare_row(Data(x=letter * fitting), None, settings=RULES, now=NOW)
        opts = InsertOpts(metadata={"x": letter * (fitting + 1)})
        with pytest.raises(ArgsError, match=r"the metadata have 1,00[12] bytes"):
            prepare_row(Data(), opts, settings=RULES, now=NOW)
        with pytest.raises(ArgsError, match=r"the args have 1,00[12] bytes"):
            prepare_row(Data(x=letter * (fitting + 1)), None, settings=RULES, now=NOW)


@pytest.mark.parametrize("letter", ["<", "\u2028"])
def test_too_many_escapes_are_refused_early(monkeypatch: pytest.MonkeyPatch, letter: str) -> None:
    """A text whose escapes make it too large is refused without escaping it first (BI-07)."""
    monkeypatch.setattr(_json, "JSON_SIZE_MAX", 1000)
    for args in (Data(x=letter * 165), RawArgs("raw", f'{{"x": "{letter * 165}"}}')):
        prepare_row(args, None, settings=RULES, now=NOW)
    for args in (
        Data(x=letter * 170),
        Data({letter * 170: 1}),
        RawArgs("raw", f'{{"x": "{letter * 170}"}}'),
    ):
        with pytest.raises(ArgsError, match=r"the text has 1,0\d\d characters as JSON"):
            prepare_row(args, None, settings=RULES, now=NOW)


async def test_batches_larger_than_a_message_are_refused(
    inserter: Inserter, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is too large for one statement is refused. COPY can insert it (BI-07)."""
    monkeypatch.setattr(_insert, "INSERT_STATEMENT_BYTES_MAX", 999)
    params = many(*[Data(x="x" * 90)] * 10)
    await inserter.insert_many(params[:9], tx=None)
    with pytest.raises(InsertError, match=r"the batch has 1,000 bytes, .* insert_many_fast"):
        await inserter.insert_many(params, tx=None)
    assert await inserter.insert_many_fast(params, tx=None) == 10
    assert len(await schema.jobs()) == 19


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.ProgramLimitExceededError("total size of jsonb array elements exceeds the maximum"),
        asyncpg.InternalServerError("invalid memory alloc request size 1073741824"),
    ],
)
def test_args_too_large_for_postgresql(error: Exception) -> None:
    """Args that PostgreSQL finds too large raise ArgsError (BI-07)."""
    with (
        pytest.raises(ArgsError, match="the args or metadata are too large for PostgreSQL"),
        translate_insert_errors(None),
    ):
        raise error


async def test_a_database_without_the_tables(fresh_database_url: str) -> None:
    """Without River's tables the error contains the command that creates them."""
    for schema in (None, "nowhere"):
        async with inserter_on(fresh_database_url, schema) as inserter:
            for send in (inserter.insert_many, inserter.insert_many_fast):
                with pytest.raises(SchemaMissingError, match="run `riverpy migrate up`"):
                    await send(many(Welcome(1)), tx=None)
