"""Unique keys: which jobs are duplicates."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import pytest
import structlog

from riverpy._insert import unique_key as _unique
from riverpy._insert.row import InsertSettings, prepare_row
from riverpy.errors import InsertError, UniqueConflictError
from riverpy.insert_opts import (
    UNIQUE_STATES_DEFAULT,
    UNIQUE_STATES_REQUIRED,
    InsertManyParams,
    InsertOpts,
    Unique,
    UniqueOpts,
)
from riverpy.job import JobState, RawArgs
from tests.insert.conftest import inserter_on
from tests.insert.jobs import BY_ARGS, Data, Welcome, by_states, many

if TYPE_CHECKING:
    from riverpy._insert.inserter import Inserter
    from tests._database import Schema

NOW = datetime(2026, 8, 7, 12, 34, 56, tzinfo=UTC)
RULES = InsertSettings(default_max_attempts=25)
ALL_STATES = tuple(JobState)
SET_STATE = (
    "UPDATE river_job SET state = $1::text::river_job_state, finalized_at ="
    " CASE WHEN $1::text IN ('completed', 'cancelled', 'discarded') THEN now() END"
)


def key_text(args: Any, opts: UniqueOpts) -> str:
    """Return the key in hexadecimal digits."""
    row = prepare_row(args, InsertOpts(unique_opts=opts), settings=RULES, now=NOW)
    assert row.unique_key is not None
    return row.unique_key


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("path", ["insert", "insert_tx", "many", "many_tx", "mixed"])
async def test_duplicates_for_each_kind_of_insert(
    inserter: Inserter, schema: Schema, path: str
) -> None:
    """The second insert returns the job of the first, for each kind of insert (UQ-03)."""
    async with schema.connected() as tx, tx.transaction():
        for expected in (False, True):
            on = tx if path.endswith("tx") else None
            if path.startswith("insert"):
                result = await inserter.insert(Welcome(1), BY_ARGS, tx=on)
            else:
                params = many(Welcome(1, f"note {expected}"), opts=BY_ARGS)
                if path == "mixed":
                    params.append(InsertManyParams(Data(x=1), InsertOpts(priority=2)))
                result, *_ = await inserter.insert_many(params, tx=on)
            assert result.unique_skipped_as_duplicate is expected
    (job, *others) = [row for row in await schema.jobs() if row["kind"] == "welcome"]
    assert not others
    assert result.job.id == job["id"]
    assert result.job.encoded_args == job["args"]


async def test_fast_inserts_meet_a_conflict(inserter: Inserter, schema: Schema) -> None:
    """insert_many_fast stores unique keys. A conflict raises an error and nothing is stored
    (UQ-03)."""
    assert await inserter.insert_many_fast(many(Welcome(1), opts=BY_ARGS), tx=None) == 1
    for params in (
        many(Welcome(2), Welcome(1), opts=BY_ARGS),
        many(Welcome(3), Welcome(3), opts=BY_ARGS),
    ):
        with pytest.raises(UniqueConflictError, match="insert_many skips duplicates"):
            await inserter.insert_many_fast(params, tx=None)
    assert len(await schema.jobs()) == 1
    again = await inserter.insert(Welcome(1), BY_ARGS, tx=None)
    assert again.unique_skipped_as_duplicate


async def test_a_running_job_is_not_started_again(inserter: Inserter, schema: Schema) -> None:
    """While a job runs, 20 concurrent inserts return it as duplicates (UQ-05)."""
    first = (await inserter.insert(Welcome(1), BY_ARGS, tx=None)).job
    await schema.execute(SET_STATE, "running")
    results = await asyncio.gather(
        *(inserter.insert(Welcome(1), BY_ARGS, tx=None) for _ in range(20))
    )
    assert {(r.job.id, r.job.state, r.unique_skipped_as_duplicate) for r in results} == {
        (first.id, JobState.RUNNING, True)
    }
    await schema.execute(SET_STATE, "completed")
    assert (await inserter.insert(Welcome(1), BY_ARGS, tx=None)).unique_skipped_as_duplicate
    assert len(await schema.jobs()) == 1


async def test_many_inserts_of_a_new_key_at_once(inserter: Inserter, schema: Schema) -> None:
    """One of many concurrent inserts inserts the job, and the others return it."""
    results = await asyncio.gather(
        *(inserter.insert(Welcome(1), BY_ARGS, tx=None) for _ in range(20))
    )
    assert sorted(r.unique_skipped_as_duplicate for r in results) == [False] + [True] * 19
    assert {result.job.id for result in results} == {(await schema.jobs())[0]["id"]}


async def test_keys_with_every_byte(inserter: Inserter, schema: Schema) -> None:
    """1,000 keys, and rows without a key, are stored and found again (UQ-07)."""
    params = [
        InsertManyParams(Welcome(number), BY_ARGS if number % 4 else None) for number in range(1000)
    ]
    await inserter.insert_many(params, tx=None)
    rows = await schema.fetch(
        "SELECT (args->>'user_id')::int, encode(unique_key, 'hex') FROM river_job"
    )
    keys = dict(map(tuple, rows))
    assert "00" in "".join(filter(None, keys.values()))
    for number in range(1000):
        expected = hashed(f'&kind=welcome&args={{"user_id":{number}}}') if number % 4 else None
        assert keys[number] == expected
    again = await inserter.insert_many(params, tx=None)
    assert [r.unique_skipped_as_duplicate for r in again] == [
        bool(number % 4) for number in range(1000)
    ]


@pytest.mark.parametrize("state", ALL_STATES)
@pytest.mark.parametrize(
    "held",
    [
        UNIQUE_STATES_DEFAULT,
        frozenset(UNIQUE_STATES_REQUIRED),
        frozenset({*UNIQUE_STATES_REQUIRED, JobState.CANCELLED, JobState.DISCARDED}),
        frozenset(ALL_STATES),
    ],
    ids=["default", "required", "failed", "all"],
)
async def test_key_is_kept_in_its_states(
    inserter: Inserter, schema: Schema, state: JobState, held: frozenset[JobState]
) -> None:
    """A second job can be inserted exactly when the first job's state is not in by_state
    (UQ-09)."""
    opts = by_states(*held)
    first = (await inserter.insert(Welcome(1), opts, tx=None)).job
    assert first.unique_states == [one for one in ALL_STATES if one in held]
    await schema.execute(SET_STATE, state)
    second = await inserter.insert(Welcome(1), opts, tx=None)
    assert second.unique_skipped_as_duplicate is (state in held)
    assert (second.job.id == first.id) is (state in held)


async def test_a_job_does_not_conflict_with_itself(inserter: Inserter, schema: Schema) -> None:
    """A unique job can go through every state of a failed attempt (UQ-01)."""
    opts = InsertOpts(
        scheduled_at=NOW, unique_opts=UniqueOpts(by_args=True, by_state=UNIQUE_STATES_REQUIRED)
    )
    job = (await inserter.insert(Welcome(1), opts, tx=None)).job
    for state in ("available", "running", "retryable", "available", "running", "completed"):
        await schema.execute(SET_STATE, state)
    (row,) = await schema.jobs()
    assert (row["id"], row["state"], row["unique_key"]) == (job.id, "completed", job.unique_key)


@pytest.mark.parametrize("missing", UNIQUE_STATES_REQUIRED)
def test_lists_of_states_with_gaps_are_refused(missing: JobState) -> None:
    """The error names the missing states. A repeated state is allowed (UQ-10)."""
    states = [state for state in ALL_STATES if state is not missing]
    with pytest.raises(InsertError, match=f"missing: {missing}$"):
        prepare_row(Welcome(1), by_states(*states), settings=RULES, now=NOW)
    with pytest.raises(InsertError, match="missing: available, pending, running, scheduled"):
        prepare_row(Welcome(1), by_states(), settings=RULES, now=NOW)
    with pytest.raises(InsertError, match="nonsense"):
        prepare_row(Welcome(1), by_states(*ALL_STATES, "nonsense"), settings=RULES, now=NOW)  # pyright: ignore
    twice = prepare_row(Welcome(1), by_states(*ALL_STATES, *ALL_STATES), settings=RULES, now=NOW)
    assert twice.unique_states == "11111111"


async def test_crossed_batches_do_not_deadlock(schema: Schema) -> None:
    """Two connections insert the same 200 keys in opposite order 50 times without a deadlock
    (UQ-12)."""
    async with inserter_on(schema.url, schema.name) as inserter:
        for round_number in range(50):
            jobs = [Welcome(round_number * 1000 + number) for number in range(200)]
            ways = (many(*jobs, opts=BY_ARGS), many(*reversed(jobs), opts=BY_ARGS))

            async def on_tx(params: list[InsertManyParams]) -> int:
                async with schema.connected() as conn, conn.transaction():
                    results = await inserter.insert_many(params, tx=conn)
                return sum(not result.unique_skipped_as_duplicate for result in results)

            assert sum(await asyncio.gather(*map(on_tx, ways))) == 200


async def test_crossed_copies_do_not_deadlock(inserter: Inserter, schema: Schema) -> None:
    """If two COPYs insert the same keys in opposite order, one succeeds and the other has a
    conflict (UQ-12)."""
    for round_number in range(20):
        jobs = [Welcome(round_number * 1000 + number) for number in range(200)]
        ways = (many(*jobs, opts=BY_ARGS), many(*reversed(jobs), opts=BY_ARGS))

        async def on_tx(params: list[InsertManyParams]) -> int:
            async with schema.connected() as conn, conn.transaction():
                try:
                    return await inserter.insert_many_fast(params, tx=conn)
                except UniqueConflictError:
                    return 0

        assert sum(await asyncio.gather(*map(on_tx, ways))) == 200


async def test_duplicates_inside_a_batch(inserter: Inserter, schema: Schema) -> None:
    """If two jobs of a batch have one key, the later one is a duplicate of the first, even if the
    first is a duplicate itself."""
    for existed in (False, True):
        results = await inserter.insert_many(
            many(Welcome(1), Welcome(2), Welcome(1, "again"), Welcome(1), opts=BY_ARGS), tx=None
        )
        assert [r.unique_skipped_as_duplicate for r in results] == [existed, existed, True, True]
        assert len({results[at].job.id for at in (0, 2, 3)}) == 1
    assert len(await schema.jobs()) == 2


async def test_a_conflict_changes_nothing(inserter: Inserter, schema: Schema) -> None:
    """With exclude_kind an insert does not change the existing job of another kind."""
    opts = InsertOpts(unique_opts=UniqueOpts(by_args=True, exclude_kind=True))
    await inserter.insert(RawArgs("first", '{"a": 1}'), opts, tx=None)
    (before,) = await schema.jobs()
    result = await inserter.insert(RawArgs("second", '{"a":1}'), opts, tx=None)
    assert result.unique_skipped_as_duplicate
    assert result.job.kind == "first"
    assert (await schema.jobs()) == [before]


async def test_recreated_index(inserter: Inserter, schema: Schema) -> None:
    """An open connection can insert after the unique index was dropped and created again
    (UQ-06)."""
    await inserter.insert(Welcome(1), BY_ARGS, tx=None)
    (definition,) = await schema.fetch(
        "SELECT indexdef FROM pg_indexes WHERE schemaname = $1"
        " AND indexname = 'river_job_unique_idx'",
        schema.name,
    )
    await schema.execute("DROP INDEX river_job_unique_idx")
    await schema.execute(definition["indexdef"])
    assert (await inserter.insert(Welcome(1), BY_ARGS, tx=None)).unique_skipped_as_duplicate


# The key


def test_equal_args_have_the_same_key() -> None:
    """Equal args have the same key. As in Go's maps, 1 equals 1.0, and "1" is different (UQ-08)."""
    opts = UniqueOpts(by_args=True)
    items = list({"é": 1, "b": {"y": [1, {"q": 1, "p": 2}], "x": None}, "a": "<"}.items())
    keys: set[str] = set()
    for seed in range(20):
        random.Random(seed).shuffle(items)
        keys.add(key_text(Data(items), opts))
    assert len(keys) == 1
    assert key_text(Data(n=1), opts) == key_text(Data(n=1.0), opts)
    assert key_text(Data(n=1), opts) != key_text(Data(n="1"), opts)
    raw = [RawArgs("data", text) for text in ('{"b":1,"a":2}', ' {"a": 2,\n"b": 1 } ')]
    assert len({key_text(args, opts) for args in raw}) == 1


def test_periods_are_counted_from_the_year_one() -> None:
    """A period of one week starts on Monday in UTC."""
    opts = UniqueOpts(by_period=timedelta(days=7))
    expected = hashed("&kind=welcome&period=2026-08-03T00:00:00Z")
    assert key_text(Welcome(1), opts) == expected
    early = UniqueOpts(by_period=timedelta(days=800_000))
    assert key_text(Welcome(1), early) == hashed("&kind=welcome&period=0001-01-01T00:00:00Z")


@pytest.mark.parametrize(
    "opts",
    [
        UniqueOpts(by_args=True, exclude_kind=True),
        UniqueOpts(by_period=timedelta(days=1), exclude_kind=True),
        UniqueOpts(by_queue=True, exclude_kind=True),
    ],
    ids=["args", "period", "queue"],
)
def test_exclude_kind(opts: UniqueOpts) -> None:
    """With `exclude_kind`, jobs of two kinds with equal args have the same key."""
    first, second = (key_text(RawArgs(kind, "{}"), opts) for kind in ("first", "second"))
    assert first == second


@pytest.mark.parametrize(
    ("call", "own", "period"),
    [
        (None, None, "2026-08-07T12:00:00Z"),
        (None, "2027-01-01T00:30:00+05:30", "2026-12-31T18:00:00Z"),
        ("1999-12-31T23:59:59.999999-08:00", "2027-01-01T00:00:00Z", "2000-01-01T07:30:00Z"),
    ],
    ids=["now", "class", "call"],
)
def test_the_period_is_that_of_the_scheduled_time(
    call: str | None, own: str | None, period: str
) -> None:
    """The period is that of `scheduled_at`, even if the args class sets it, or else of the insert.
    It is in UTC (CF-014, unique_hash_goldens)."""

    class Timed(msgspec.Struct):
        kind: ClassVar[str] = "timed"

        def insert_opts(self) -> InsertOpts:
            return InsertOpts(scheduled_at=own and datetime.fromisoformat(own))

    opts = InsertOpts(
        scheduled_at=call and datetime.fromisoformat(call),
        unique_opts=UniqueOpts(by_period=timedelta(minutes=90)),
    )
    row = prepare_row(Timed(), opts, settings=RULES, now=NOW)
    assert row.unique_key == hashed(f"&kind=timed&period={period}")


def test_an_empty_array_has_the_key_of_an_empty_object() -> None:
    """Raw args may be an empty array, but no other array (CF-014, unique_hash_goldens)."""
    opts = UniqueOpts(by_args=True)
    keys = {key_text(RawArgs("raw", text), opts) for text in ("{}", "[]", " [ ] ")}
    assert keys == {hashed("&kind=raw&args={}")}


@pytest.mark.parametrize(
    ("own", "call", "is_warned"),
    [
        (None, None, True),
        (None, UniqueOpts(by_queue=True), True),
        (None, UniqueOpts(by_args=True), False),
        (UniqueOpts(by_args=True), None, False),
    ],
    ids=["none", "by_queue", "call", "class"],
)
def test_marks_without_by_args_are_warned_about(
    own: UniqueOpts | None, call: UniqueOpts | None, is_warned: bool
) -> None:
    """The first insert of a class whose marked fields have no effect logs a warning, once."""

    class Marked(msgspec.Struct):
        kind: ClassVar[str] = "marked"
        user_id: Annotated[int, Unique] = 1

        def insert_opts(self) -> InsertOpts:
            return InsertOpts(unique_opts=own)

    with structlog.testing.capture_logs() as logs:
        for opts in (InsertOpts(unique_opts=call), None):
            prepare_row(Marked(), opts, settings=RULES, now=NOW)
    expected = {
        "kind": "marked",
        "fields": ["user_id"],
        "advice": "set UniqueOpts(by_args=True)",
        "log_level": "warning",
    }
    assert [{**log, "event": ""} for log in logs] == [{**expected, "event": ""}] * is_warned


def test_memory_of_classes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that creates many args classes does not keep all of them in memory."""
    monkeypatch.setattr(_unique, "_checked_args_classes", set())
    monkeypatch.setattr(_unique, "_CHECKED_CLASSES_MAX", 2)
    for _ in range(5):
        cls = msgspec.defstruct("Made", [], namespace={"kind": "made"})
        prepare_row(cls(), None, settings=RULES, now=NOW)
    assert len(_unique._checked_args_classes) == 2


class City(msgspec.Struct):
    name: Annotated[str, Unique]
    zip: str = ""


@dataclass
class Home:
    city: City
    other: Annotated[City, Unique]
    third: City
    street: str = ""


@dataclass
class Move:
    kind: ClassVar[str] = "move"

    home: Home
    tags: Annotated[list[City], Unique]
    again: Move | None = None
    old: Annotated[City | None, "text"] | None = None


def test_marked_fields_of_nested_classes() -> None:
    """Marked fields are found at any depth, in sorted order. Each class is searched once."""
    assert _unique.find_unique_field_paths(Move) == (
        ("home", "city", "name"),
        ("home", "other"),
        ("tags",),
    )
    args = Move(Home(City("a<b"), City("c", "1"), City("d")), [City("e")])
    text = (
        r'&kind=move&args={"home":{"city":{"name":"a\u003cb"},"other":{"name":"c","zip":"1"}},'
        r'"tags":[{"name":"e","zip":""}]}'
    )
    assert key_text(args, UniqueOpts(by_args=True)) == hashed(text)


def test_numbers_as_names_of_marked_fields() -> None:
    """As in River, numeric field names become array indexes, and other names beside them are
    refused."""
    both = msgspec.defstruct(
        "Both",
        [
            ("a", Annotated[str, Unique], msgspec.field(name="0")),
            ("b", Annotated[str, Unique], msgspec.field(name="2")),
        ],
        namespace={"kind": "both"},
    )
    expected = hashed('&kind=both&args=["x",null,"y"]')
    assert key_text(both("x", "y"), UniqueOpts(by_args=True)) == expected
    for name in ("a", "1001"):
        mixed = msgspec.defstruct(
            "Mixed", [("c", Annotated[str, Unique], msgspec.field(name=name))], bases=(both,)
        )
        with pytest.raises(InsertError, match=rf"the field '{name}' of 'both' .*: rename it"):
            key_text(mixed("x", "y", "z"), UniqueOpts(by_args=True))


def test_annotations_that_cannot_be_resolved() -> None:
    """The error says what to do. Without by_args the annotations are not resolved."""

    @dataclass
    class Lost:
        kind: ClassVar[str] = "lost"
        x: Nowhere  # pyright: ignore # noqa: F821

    args: Any = Lost(1)
    with pytest.raises(InsertError, match=r"Nowhere.*import their types"):
        key_text(args, UniqueOpts(by_args=True))
    assert key_text(args, UniqueOpts(by_queue=True))


ODD_NAMES = (
    "",
    "0",
    "a.b",
    "a",
    "*",
    "#",
    "@x",
    ":lead",
    "!bang",
    "a\\b",
    "[b]",
    "{c}",
    "x?",
    "|",
    "<",
)


def test_keys_of_args_count_by_their_names() -> None:
    """Each top-level key of args counts in the unique key, whatever its characters (CF-014,
    unique_hash_goldens)."""
    opts = UniqueOpts(by_args=True)
    members = [f"{json.dumps(name)}:{n}" for n, name in enumerate(sorted(ODD_NAMES))]
    with structlog.testing.capture_logs() as logs:
        key = key_text(Data({name: n for n, name in enumerate(sorted(ODD_NAMES))}), opts)
    assert key == hashed(f"&kind=data&args={{{','.join(members)}}}")
    assert logs == []


def test_names_of_marked_fields_are_literal() -> None:
    """A marked field counts by its path of names. A name with a dot differs from a nested field.
    Paths are sorted as if joined by dots."""
    field = msgspec.field
    inner = msgspec.defstruct(
        "Inner",
        [
            ("b", Annotated[int, Unique], field(name="b")),
            ("star", Annotated[int, Unique], field(name="x*")),
            ("note", str, field(default="")),
        ],
    )
    outer = msgspec.defstruct(
        "Outer",
        [
            ("a", inner),
            ("dotted", Annotated[int, Unique], field(name="a.b")),
            ("dashed", Annotated[int, Unique], field(name="a-")),
            ("colon", Annotated[int, Unique], field(name=":c")),
            ("hidden", inner | None, field(name="a.c", default=None)),
        ],
        namespace={"kind": "outer"},
    )
    expected = '{":c":5,"a-":4,"a":{"b":1,"x*":2},"a.b":3}'
    assert key_text(outer(inner(1, 2), 3, 4, 5), UniqueOpts(by_args=True)) == hashed(
        f"&kind=outer&args={expected}"
    )
