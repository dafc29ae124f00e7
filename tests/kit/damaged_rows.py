"""Rows whose stored values are damaged, as by a bad disk. Reading one of the damaged columns
fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests._database import Schema

LONG = "(SELECT string_agg(md5((i * random())::text), '') FROM generate_series(1, 700) AS i)"
"""A text of 22,400 characters that does not compress, so that the server stores it in chunks."""
VALUES = {
    "args": f"jsonb_build_object('n', {LONG})",
    "attempted_by": f"array[{LONG}]",
    "errors": f"array[jsonb_build_object('error', {LONG})]",
    "metadata": f"jsonb_build_object('n', {LONG})",
    "tags": f"regexp_split_to_array({LONG}, '(?<=^(.{{200}})+)')",
}
"""A value for each wide column of a job. The server stores it in chunks."""
DAMAGE = "chunk number"
"""The text of the server's error for a damaged value."""


async def damage(schema: Schema, job_id: int, column: str) -> None:
    """Remove the first stored chunk of a job's column. Skips the test where the server lacks the
    extension for it."""
    if not await schema.fetchval(
        "SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_surgery'"
    ):
        pytest.skip("the server lacks pg_surgery")
    await schema.execute("CREATE EXTENSION IF NOT EXISTS pg_surgery SCHEMA public")
    chunks = await schema.fetchval(
        "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = 'river_job'::regclass"
    )
    known = await schema.fetchval(f"SELECT array_agg(DISTINCT chunk_id) FROM {chunks}")
    await schema.execute(f"UPDATE river_job SET {column} = {VALUES[column]} WHERE id = $1", job_id)
    killed = await schema.fetchval(
        f"SELECT array_agg(ctid::text) FROM {chunks}"
        " WHERE chunk_seq = 0 AND chunk_id <> ALL (coalesce($1::oid[], '{}'))",
        known,
    )
    assert killed, f"{column} is not stored in chunks"
    await schema.execute(
        "SELECT public.heap_force_kill($1::text::regclass, $2::text[]::tid[])", chunks, killed
    )
