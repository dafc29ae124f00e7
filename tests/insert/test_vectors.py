"""Unique keys and states equal those that River in Go wrote."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from riverpy._duration import parse_duration
from riverpy._insert.row import InsertSettings, prepare_row
from riverpy.errors import RiverError
from riverpy.insert_opts import InsertManyParams, InsertOpts, UniqueOpts
from riverpy.job import JobState, RawArgs
from tests.insert.vector_args import STRUCTS

if TYPE_CHECKING:
    from riverpy._insert.inserter import Inserter
    from riverpy._postgres.inserts import InsertRow
    from tests._database import Schema

VECTORS: list[dict[str, Any]] = json.loads(
    Path(__file__).parents[1].joinpath("vectors", "unique-keys.json").read_text("utf-8")
)["vectors"]
RULES = InsertSettings(default_max_attempts=25, skip_job_kind_validation=True)
NOW = datetime(2026, 3, 15, 14, 27, 41, tzinfo=UTC)
REFUSED = {"gomap/lone_surrogate"}
"""Go replaces what it cannot read; riverpy refuses it."""


class MapArgs(dict[str, Any]):
    """A Go map."""

    kind: ClassVar[str] = "vec_kind"


def vector_args(vector: dict[str, Any]) -> Any:
    text, mode = vector["args_text"], vector.get("mode", "raw")
    if mode == "raw":
        return RawArgs(vector["kind"], text)
    if mode == "any":
        return MapArgs(json.loads(text, parse_int=float))
    return msgspec.json.decode(text, type=STRUCTS[mode.removeprefix("struct:")])


def vector_opts(vector: dict[str, Any]) -> InsertOpts:
    states = vector.get("by_state")
    at = vector.get("given_scheduled_at")
    return InsertOpts(
        queue=vector.get("queue"),
        scheduled_at=None if at is None else datetime.fromisoformat(at),
        unique_opts=UniqueOpts(
            by_args=vector.get("by_args", False),
            by_period=parse_duration(vector["period"]) if "period" in vector else None,
            by_queue=vector.get("by_queue", False),
            by_state=None if states is None else [JobState(state) for state in states],
            exclude_kind=vector.get("exclude_kind", False),
        ),
    )


def prepared(vector: dict[str, Any]) -> InsertRow:
    now = datetime.fromisoformat(vector["now"]) if "now" in vector else NOW
    return prepare_row(vector_args(vector), vector_opts(vector), settings=RULES, now=now)


def names(*, refused: bool) -> list[str]:
    return [v["name"] for v in VECTORS if ("error" in v or v["name"] in REFUSED) == refused]


BY_NAME = {vector["name"]: vector for vector in VECTORS}


@pytest.mark.parametrize("name", names(refused=False))
def test_key_and_states_equal_the_vectors(name: str) -> None:
    """The encoded args, the unique key and the states equal Go's (UQ-08, CF-014,
    unique_hash_goldens)."""
    vector = BY_NAME[name]
    row = prepared(vector)
    if "mode" in vector:
        assert row.args == vector["encoded_args"]
    assert row.unique_key == vector.get("unique_key")
    assert row.unique_states == vector.get("unique_states")


@pytest.mark.parametrize("name", names(refused=True))
def test_what_cannot_be_stored_is_refused(name: str) -> None:
    """A vector that Go or PostgreSQL refused, or that has broken text, is refused."""
    with pytest.raises(RiverError):
        prepared(BY_NAME[name])


def test_every_vector_is_shown() -> None:
    """All 147 vectors are tested."""
    assert len(VECTORS) == len(BY_NAME) == 147
    assert {*names(refused=False), *names(refused=True)} == set(BY_NAME)


async def test_vectors_are_stored_like_gos(inserter: Inserter, schema: Schema) -> None:
    """The stored keys, states and args of all vectors equal Go's (UQ-07)."""
    good = [v for v in VECTORS if v["name"] in names(refused=False) and "now" not in v]
    rules = InsertSettings(default_max_attempts=25, skip_job_kind_validation=True)
    inserter._insert_settings = rules
    params = [InsertManyParams(vector_args(v), vector_opts(v)) for v in good]
    for vector, result in zip(good, await inserter.insert_many(params, tx=None), strict=True):
        if result.unique_skipped_as_duplicate:
            continue
        row = await schema.fetchrow(
            "SELECT encode(unique_key, 'hex'), unique_states::text, args::text, state::text"
            " FROM river_job WHERE id = $1",
            result.job.id,
        )
        assert row is not None
        assert row[0] == vector.get("unique_key")
        assert row[1] == vector.get("unique_states")
        assert row[3] == vector["state"]
        if "mode" in vector:
            assert row[2] == vector["stored_args"]
        assert result.job.unique_key == (row[0] and bytes.fromhex(row[0]))
