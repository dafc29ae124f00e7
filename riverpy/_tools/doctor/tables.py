"""Checks of the migrations of River's and riverpy's tables, and of the privileges of the role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import SCHEMA_LENGTH_MAX, SCHEMA_TOO_LONG
from riverpy._postgres.schema import FEATURES, MAIN_LINE, OWN_LINE, migrate_command, migrations
from riverpy._postgres.sql_files import quote_identifier
from riverpy._tools.doctor.finding import Finding, Level, fail, ok, warn
from riverpy._tools.doctor.statements import doctor_relations, doctor_schema

if TYPE_CHECKING:
    from riverpy._postgres.schema import RowSecurity, SchemaState
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import RelationRow

_MAIN_TABLES = ("river_job", "river_queue", "river_leader")
_OWN_TABLES = {
    1: "riverpy_client",
    2: "riverpy_periodic",
    4: "riverpy_lease",
    5: "riverpy_exec",
    6: "riverpy_queue_owner",
}
"""The table that each version of line `riverpy` creates."""
_TABLES = (*_MAIN_TABLES, *_OWN_TABLES.values())
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def check_migrations(state: SchemaState, schema: str | None, url: str) -> list[Finding]:
    """Report the migrations of River's tables and of riverpy's own tables. `schema` is the schema
    that the user named; None: the user named no schema."""
    up = migrate_command("riverpy migrate up", schema, url)
    if "river_migration" in state.row_security.hidden:  # the migrations cannot be read
        return [_row_security(state.row_security, {"schema": state.schema})]
    if state.needed() or state.is_unrecorded():
        return [_main_line(state, up)]
    return [_main_line(state, up), _own_line(state, up)]


def _main_line(state: SchemaState, up: str) -> Finding:
    newest, found = max(migrations(MAIN_LINE)), state.versions(MAIN_LINE)
    missing, unknown = state.missing(MAIN_LINE), state.unknown(MAIN_LINE)
    data: dict[str, object] = {
        "schema": state.schema,
        "line": MAIN_LINE,
        "missing": missing,
        "unknown": unknown,
    }
    if len(state.schema.encode()) > SCHEMA_LENGTH_MAX:
        fix = "give it a shorter name: ALTER SCHEMA … RENAME TO …"
        return fail("schema", SCHEMA_TOO_LONG, fix, data)
    if state.is_unrecorded():
        problem, _, fix = state.unrecorded_message().partition(". ")
        return fail("schema", problem, fix, data)
    if state.gap(MAIN_LINE):
        problem, _, fix = state.gap_message(MAIN_LINE).partition(". ")
        return fail("schema", problem, fix, data)
    if not found:
        text = f'schema "{state.schema}" has no tables of River'
        return fail("schema", text, f"run `{up}`", data)
    if needed := state.needed():
        text = (
            f'River\'s tables in "{state.schema}" lack version{"s" if len(needed) > 1 else ""} '
            f"{', '.join(map(str, needed))}, which this riverpy needs"
        )
        return fail("schema", text, f"run `{up}`", data)
    if unknown:
        text = (
            f'River\'s tables in "{state.schema}" are at version {max(unknown)}. This riverpy '
            f"supports only {newest}"
        )
        return warn("schema", text, "update riverpy", data)
    text = f'river {max(found)} of {newest} in "{state.schema}"'
    if missing:
        text += f": version {newest} changes nothing on PostgreSQL. `riverpy migrate up` records it"
    return ok("schema", text, data)


def _own_line(state: SchemaState, up: str) -> Finding:
    newest, found = max(migrations(OWN_LINE)), state.versions(OWN_LINE)
    missing, unknown = state.missing(OWN_LINE), state.unknown(OWN_LINE)
    off = [FEATURES[version] for version in missing if version in FEATURES]
    data: dict[str, object] = {
        "schema": state.schema,
        "line": OWN_LINE,
        "missing": missing,
        "unknown": unknown,
        "off": off,
    }
    if missing:
        text = (
            f"riverpy's own tables are at version {max(found, default=0)} of {newest}. Off: "
            f"{'; '.join(off) or 'the new features'}"
        )
        return warn("schema", text, f"run `{up}`", data)
    if unknown:
        text = (
            f"riverpy's own tables are at version {max(unknown)}. This riverpy supports only "
            f"{newest}"
        )
        return warn("schema", text, "update riverpy", data)
    text = f'riverpy {newest} of {newest} in "{state.schema}"'
    return ok("schema", text, data)


async def check_tables(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report tables that were dropped although their migration is recorded."""
    async with snapshot.session.reading() as connection:
        relations = await doctor_relations(connection, snapshot.schema)
    applied = snapshot.state.versions(OWN_LINE)
    own = [table for version, table in _OWN_TABLES.items() if version in applied]
    missing = [table for table in (*_MAIN_TABLES, *own) if table not in relations]
    if not missing:
        return []
    text = (
        f'schema "{snapshot.schema}" has no table {", ".join(missing)}, although river_migration '
        "records the migration that creates it"
    )
    fix = "restore the missing tables from a backup"
    if set(missing) <= set(own):
        place = quote_identifier(snapshot.schema)
        tables = ", ".join(f"{place}.{table}" for table in own)
        record = f"{place}.river_migration"
        fix += (
            ". Or create riverpy's own tables again, without their data: DROP TABLE IF EXISTS "  # noqa: S608 (a text for a person)
            f"{tables}; DELETE FROM {record} WHERE line = '{OWN_LINE}'; then `riverpy migrate up`"
        )
    return [fail("schema", text, fix, {"schema": snapshot.schema, "missing_tables": missing})]


async def check_grants(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report whether the role may insert jobs, work jobs, migrate and rebuild indexes."""
    async with snapshot.session.reading() as connection:
        relations = await doctor_relations(connection, snapshot.schema)
        schema = await doctor_schema(connection, snapshot.schema)
    basis = [] if schema.can_use else [f"USAGE on schema {snapshot.schema}"]
    insert = basis + _privileges_missing_to_insert(relations)
    work = insert + _privileges_missing_to_work(relations)
    owns = all(row.is_owner for row in relations.values())
    role = snapshot.server.role
    may = {
        "insert": not insert,
        "work": not insert and not work,
        "migrate": schema.can_create and owns,
        "reindex": "river_job" in relations and relations["river_job"].is_owner,
    }
    data: dict[str, object] = {"role": role, **may, "lacking": work}
    able = ", ".join(verb for verb, can in may.items() if can)
    unable = ", ".join(verb for verb, can in may.items() if not can)
    text = f'"{role}" may {able or "do nothing here"}' + (
        f"; it may not {unable}" if unable else ""
    )
    if insert:
        missing = "; ".join(insert)
        return [fail("grants", text, f"to insert, grant {missing}", data)]
    if work:
        missing = "; ".join(work)
        return [warn("grants", text, f"to work jobs, grant {missing}", data)]
    if snapshot.state.row_security.tables:
        return [_row_security(snapshot.state.row_security, data)]
    if not may["reindex"]:
        text += " (as leader it cannot rebuild the indexes)"
    return [ok("grants", text, data)]


def _row_security(security: RowSecurity, data: dict[str, object]) -> Finding:
    """Report tables with row security. The server hides rows from the role without an error, so
    riverpy does not find jobs."""
    level = Level.FAIL if security.hidden else Level.WARN
    data = data | {"row_security": security.tables}
    return Finding(level, "grants", security.problem, security.fix, data)


def _privileges_missing_to_insert(relations: dict[str, RelationRow]) -> list[str]:
    missing: list[str] = []
    migration, job = relations.get("river_migration"), relations.get("river_job")
    sequence = relations.get("river_job_id_seq")
    if migration is not None and not migration.can_select:
        missing.append("SELECT on river_migration")
    if job is not None:
        rights = [
            right
            for right, can in (
                ("SELECT", job.can_select),
                ("INSERT", job.can_insert),
                ("UPDATE (kind)", job.can_update_kind),
            )
            if not can
        ]
        if rights:
            missing.append(f"{', '.join(rights)} on river_job")
    if sequence is not None and not sequence.can_use:
        missing.append("USAGE on sequence river_job_id_seq")
    return missing


def _privileges_missing_to_work(relations: dict[str, RelationRow]) -> list[str]:
    missing: list[str] = []
    for name in _TABLES:
        if (row := relations.get(name)) is None:
            continue
        can = (row.can_select, row.can_insert, row.can_update, row.can_delete)
        rights = [right for right, has in zip(_RIGHTS, can, strict=True) if not has]
        if rights:
            missing.append(f"{', '.join(rights)} on {name}")
    return missing
