"""Unique keys are the same in both languages, and jobs of one are duplicates of the other's."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from riverpy._duration import parse_duration
from riverpy._insert.row import InsertSettings, prepare_row
from riverpy.errors import RiverError
from tests.insert.test_vectors import REFUSED, VECTORS
from tests.insert.vector_args import STRUCTS
from tests.interop.inserting import params_of, request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from riverpy import InsertResult
    from riverpy._postgres.inserts import InsertRow
    from tests.interop.inserting import Request
    from tests.interop.river_go import GoProcess, RiverGo, Row
    from tests.work.rig import Rig

RULES = InsertSettings(default_max_attempts=25, skip_job_kind_validation=True)
REQUIRED = ["available", "pending", "running", "scheduled"]
OPTIONAL = ["cancelled", "completed", "discarded", "retryable"]

# --- what is generated

SPECIAL = '<>&\u2028\u2029"\\/\x7f\b\f\n\r\t\x01.|#@*?:{[ é😀\ufffd'
TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8")) | st.text(
    SPECIAL, max_size=8
)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 1e21, 1e20, 1e-6, 9.99e-7, 0.1, 2.0**53, 1.5e300, 5e-324]
)
SCALARS = st.none() | st.booleans() | INT64 | FLOATS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=5)
TIMES = st.datetimes(
    datetime(2000, 1, 1),
    datetime(2099, 1, 1),
    timezones=st.sampled_from([UTC, *(timezone(timedelta(minutes=n)) for n in (330, -180, 765))]),
)
ADDRESSES = st.fixed_dictionaries({"street": TEXTS, "zip": TEXTS, "city": TEXTS})
BLOBS = st.fixed_dictionaries({"y": INT64, "x": TEXTS})
SAID = TEXTS.filter(bool)
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "plain": {"z": TEXTS, "a": INT64, "m": st.booleans()},
    "one": {"customer_id": INT64, "note": TEXTS},
    "two": {"z": TEXTS, "note": TEXTS, "a": INT64},
    "omit": {"a": TEXTS, "b": TEXTS, "note": SAID},
    "nested": {"name": TEXTS, "addr": ADDRESSES, "note": TEXTS},
    "nestedptr": {"name": TEXTS, "addr": st.none() | ADDRESSES},
    "whole": {"blob": BLOBS, "note": TEXTS},
    "wholeandsub": {"addr": ADDRESSES},
    "map": {"m": st.dictionaries(TEXTS, st.none() | st.booleans() | FLOATS | TEXTS), "n": INT64},
    "slice": {"l": st.none() | st.lists(INT64), "n": INT64},
    "nojson": {"Customer": TEXTS, "Note": TEXTS},
    "emb": {"e1": TEXTS, "e2": TEXTS, "q": TEXTS},
    "dot": {"a.b": TEXTS, "n": INT64},
    "float": {"f": FLOATS, "i": INT64, "u": st.integers(0, 2**64 - 1)},
    "ptr": {"p": st.none() | TEXTS, "n": INT64},
    "str": {"s": TEXTS},
    "multi": {"s": TEXTS, "t": TEXTS},
    "num": {"0": TEXTS, "1": TEXTS},
    "plainnested": {"o": BLOBS, "m": st.dictionaries(TEXTS, INT64), "a": INT64},
}
UNIQUE = st.fixed_dictionaries(
    {"by_args": st.sampled_from([True, True, False])},
    optional={
        "by_period_s": st.sampled_from([600, 3600, 7 * 3600, 86400, 7 * 86400, 999_983]),
        "by_queue": st.booleans(),
        "by_state": st.sets(st.sampled_from(OPTIONAL)).map(lambda more: [*REQUIRED, *sorted(more)]),
        "exclude_kind": st.booleans(),
    },
)


@st.composite
def texts_of(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> str:
    """Generate JSON text of a value, with different spaces and escapes."""
    return json.dumps(
        draw(values),
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([(",", ":"), (", ", " : "), ("\r\n,", ":\t")])),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Generate an insert, with raw args, args of a map or args of a struct."""
    struct = draw(st.sampled_from([None, "any", *FIELDS]))
    fields = FIELDS.get(struct or "")
    args = draw(texts_of(OBJECTS if fields is None else st.fixed_dictionaries(fields)))
    at = draw(st.none() | TIMES)
    kind = "vec_kind" if struct else draw(st.sampled_from(["vec_kind", "kind<&>é", "k.2"]))
    queue = draw(st.sampled_from(["default", "q-2"]))
    opts = {} if at is None else {"scheduled_at": at.isoformat()}
    return request(args, kind=kind, struct=struct, queue=queue, unique=draw(UNIQUE), **opts)


# --- both sides


@pytest.fixture
async def inserter(go: RiverGo) -> AsyncGenerator[GoProcess]:
    """A Go process that inserts, in a time zone other than UTC."""
    go.zone = "Asia/Kolkata"
    async with go.process("insert") as process:
        yield process


def prepared(request: Request, now: datetime) -> InsertRow | None:
    """Return the row that Python would insert, or None if it refuses."""
    params = params_of(request)
    try:
        return prepare_row(params.args, params.opts, settings=RULES, now=now)
    except RiverError:
        return None


def show(request: Request) -> Request:
    """Return a readable form of a request."""
    return request | {"args": bytes(request["args"])}


async def check_key(inserter: GoProcess, request: Request) -> Row | None:
    """Insert by Go, and check that Python's args, key and states are the same. Return None if
    refused."""
    before = prepared(request, datetime.now(UTC))
    (row,) = await inserter.insert(request)
    after = prepared(request, datetime.now(UTC))
    if before is None or after is None:
        assert "error" in row, show(request)
        return None
    assert "error" not in row, (show(request), row)
    assert row["encoded_args"] == before.args == after.args
    if not row["unique_skipped_as_duplicate"]:
        # Two tries, because a period may have ended in between.
        assert row["unique_key"] in {before.unique_key, after.unique_key}, show(request)
        mask = None if row["unique_states"] is None else f"{row['unique_states']:08b}"
        assert mask == before.unique_states
    return row


def test_every_struct_is_generated() -> None:
    """The generator has all classes of the vectors."""
    assert set(FIELDS) == set(STRUCTS)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(batch=st.lists(requests(), min_size=1, max_size=10), go_first=st.booleans())
async def test_keys_agree(
    inserter: GoProcess, rig: Rig, batch: list[Request], go_first: bool
) -> None:
    """For any args and unique options both languages encode the same bytes, compute the same key,
    and detect the other's job as a duplicate (UQ-08)."""
    async with rig.client(skip_job_kind_validation=True) as client:
        now = datetime.now(UTC)
        good = [one for one in batch if prepared(one, now) is not None]

        async def by_python() -> Sequence[InsertResult]:
            return await client.insert_many([params_of(one) for one in good]) if good else []

        if go_first:
            rows = [row for one in batch if (row := await check_key(inserter, one))]
            results = await by_python()
            seconds = [result.unique_skipped_as_duplicate for result in results]
            pairs = list(zip([row["id"] for row in rows], [r.job.id for r in results], strict=True))
        else:
            results = await by_python()
            rows = [row for one in batch if (row := await check_key(inserter, one))]
            seconds = [row["unique_skipped_as_duplicate"] for row in rows]
            pairs = list(zip([r.job.id for r in results], [row["id"] for row in rows], strict=True))
    for one, is_duplicate, (first, second) in zip(good, seconds, pairs, strict=True):
        unique = one["opts"]["unique"]
        if "by_period_s" in unique and not is_duplicate:
            continue  # a period ended in between
        expected = any(
            unique.get(key) for key in ("by_args", "by_period_s", "by_queue", "by_state")
        )
        assert is_duplicate == expected, show(one)
        assert (first == second) == expected, show(one)


async def test_keys_count_by_their_names(inserter: GoProcess) -> None:
    """A top-level key of the args has no other meaning than its name, even one that earlier
    versions of River read as a path."""
    parts = ["", "a", *"\\.|#@*?:[{!", "{}", "[]", "1"]
    for key in (first + second for first in parts for second in parts):
        one = request(json.dumps({key: 0, "a": 1}), unique={"by_args": True})
        assert await check_key(inserter, one), key


async def test_vectors_agree(inserter: GoProcess) -> None:
    """The structs of the Go program are those of the vectors, and River makes the recorded keys and
    refusals."""
    for vector in VECTORS:
        if "now" in vector or vector["name"] in REFUSED:
            continue
        mode = vector.get("mode", "raw").removeprefix("struct:")
        unique = {
            key: vector[key]
            for key in ("by_args", "by_queue", "by_state", "exclude_kind")
            if key in vector
        }
        opts: dict[str, Any] = {}
        if "period" in vector:
            unique["by_period_s"] = parse_duration(vector["period"]).total_seconds()
            opts["scheduled_at"] = vector["given_scheduled_at"]
        one = request(
            vector["args_text"],
            kind=vector["kind"],
            struct=None if mode == "raw" else mode,
            queue=vector.get("queue", ""),
            unique=unique,
            **opts,
        )
        (row,) = await inserter.insert(one)
        assert ("error" in row) == ("error" in vector), vector
        assert row.get("unique_key") == vector.get("unique_key"), vector
        if "mode" in vector and "error" not in vector:
            assert row["encoded_args"] == vector["encoded_args"], vector


async def test_at_once(inserter: GoProcess, rig: Rig) -> None:
    """Of two inserts with one key at the same moment, one in each language, one is stored and the
    other returns it."""
    stored = {"go": 0, "python": 0}
    async with rig.client() as client:

        async def by_go(one: Request, found: list[tuple[int, bool]]) -> None:
            (row,) = await inserter.insert(one)
            found.append((row["id"], row["unique_skipped_as_duplicate"]))
            stored["go"] += not row["unique_skipped_as_duplicate"]

        async def by_python(one: Request, found: list[tuple[int, bool]]) -> None:
            params = params_of(one)
            result = await client.insert(params.args, params.opts)
            found.append((result.job.id, result.unique_skipped_as_duplicate))
            stored["python"] += not result.unique_skipped_as_duplicate

        for number in range(50):
            args = json.dumps({"customer_id": number, "note": "x"})
            one = request(args, struct="one", unique={"by_args": True})
            found: list[tuple[int, bool]] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(by_go, one, found)
                tasks.start_soon(by_python, one, found)
            assert len({job_id for job_id, _ in found}) == 1
            assert sorted(skipped for _, skipped in found) == [False, True]
    assert sum(stored.values()) == await rig.schema.fetchval("SELECT count(*) FROM river_job") == 50
