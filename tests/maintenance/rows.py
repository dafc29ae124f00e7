"""Rows of River's tables, as a test needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests._database import Schema

ENDED = ("cancelled", "completed", "discarded")


async def insert_jobs(schema: Schema, count: int = 1, **columns: str) -> list[int]:
    """Insert jobs, each column given as an SQL expression over `i`, 1 to `count`; returns the
    ids."""
    columns = {"kind": "'task'", "args": "'{}'", "max_attempts": "25"} | columns
    if "state" in columns:
        columns["state"] = f"({columns['state']})::river_job_state"
    rows = await schema.fetch(
        f"INSERT INTO river_job ({', '.join(columns)}) SELECT {', '.join(columns.values())}"
        f" FROM generate_series(1, {count}) AS i RETURNING id"
    )
    return [row["id"] for row in rows]


async def insert_ended(schema: Schema, state: str, age: str, count: int = 1, **columns: str) -> int:
    """Insert jobs that ended so long ago; returns the id of the last."""
    ids = await insert_jobs(
        schema,
        count,
        state=f"'{state}'",
        finalized_at=f"now() - interval '{age}'",
        **columns,
    )
    return ids[-1]


async def ids_of(schema: Schema) -> set[int]:
    """The ids of all jobs."""
    return {row["id"] for row in await schema.fetch("SELECT id FROM river_job")}


async def states_of(schema: Schema) -> dict[int, str]:
    """The state of each job."""
    rows = await schema.fetch("SELECT id, state::text FROM river_job")
    return {row["id"]: row["state"] for row in rows}


async def refuse_many(schema: Schema, most: int) -> None:
    """Let the server end a statement for its time that deletes or updates more jobs than this."""
    await schema.execute(
        "CREATE OR REPLACE FUNCTION refuse_many() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF (SELECT count(*) FROM gone) > {most} THEN"
        " RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014';"
        " END IF; RETURN NULL; END $$;"
        " CREATE TRIGGER refuse_many_deletes AFTER DELETE ON river_job"
        " REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION refuse_many();"
        " CREATE TRIGGER refuse_many_updates AFTER UPDATE ON river_job"
        " REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION refuse_many()"
    )


async def accept_many(schema: Schema) -> None:
    """Undo `refuse_many`."""
    await schema.execute("DROP FUNCTION refuse_many CASCADE")
