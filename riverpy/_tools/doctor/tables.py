"""Tables: which of River's are there, whether their indexes work, and what the role may do with
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import SCHEMA_LENGTH_MAX, SCHEMA_TOO_LONG
from riverpy._postgres.schema import FEATURES, MAIN_LINE, OWN_LINE, migrate_command, migrations
from riverpy._tools.doctor.finding import Finding, Level
from riverpy._tools.doctor.statements import doctor_relations, doctor_schema

if TYPE_CHECKING:
    from riverpy._postgres.schema import RowSecurity, SchemaState
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import RelationRow

_WORKED = (
    *("river_job", "river_queue", "river_leader", "riverpy_client", "riverpy_periodic"),
    *("riverpy_lease", "riverpy_exec", "riverpy_queue_owner"),
)
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def lines_findings(state: SchemaState, schema: str | None, url: str) -> list[Finding]:
    """How far River's line of migrations and ours are applied. `schema` is the one that was asked
    for."""
    up = migrate_command("riverpy migrate up", schema, url)
    if "river_migration" in state.row_security.hidden:  # so what it records is not known
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
        return Finding(Level.FAIL, "schema", SCHEMA_TOO_LONG, fix, data)
    if state.is_unrecorded():
        problem, _, fix = state.unrecorded_message().partition(". ")
        return Finding(Level.FAIL, "schema", problem, fix, data)
    if state.gap(MAIN_LINE):
        problem, _, fix = state.gap_message(MAIN_LINE).partition(". ")
        return Finding(Level.FAIL, "schema", problem, fix, data)
    if not found:
        text = f'schema "{state.schema}" does not have River\'s tables'
        return Finding(Level.FAIL, "schema", text, f"run `{up}`", data)
    if needed := state.needed():
        text = (
            f'River\'s tables in "{state.schema}" lack version{"s" if len(needed) > 1 else ""} '
            f"{', '.join(map(str, needed))}, which this riverpy needs"
        )
        return Finding(Level.FAIL, "schema", text, f"run `{up}`", data)
    if unknown:
        text = (
            f'River\'s tables in "{state.schema}" are at version {max(unknown)}, and this riverpy '
            f"knows {newest}"
        )
        return Finding(Level.WARN, "schema", text, "update riverpy", data)
    text = f'river {max(found)} of {newest} in "{state.schema}"'
    if missing:
        text += f": version {newest} changes nothing on PostgreSQL; `riverpy migrate up` records it"
    return Finding(Level.OK, "schema", text, data=data)


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
            f"riverpy's own tables are at version {max(found, default=0)} of {newest}: off is "
            f"{'; '.join(off) or 'what is new'}"
        )
        return Finding(Level.WARN, "schema", text, f"run `{up}`", data)
    if unknown:
        text = f"riverpy's own tables are at version {max(unknown)}, and this one knows {newest}"
        return Finding(Level.WARN, "schema", text, "update riverpy", data)
    text = f'riverpy {newest} of {newest} in "{state.schema}"'
    return Finding(Level.OK, "schema", text, data=data)


async def check_grants(patient: DatabaseSnapshot) -> list[Finding]:
    """What the role may do.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with patient.session.reading() as connection:
        relations = await doctor_relations(connection, patient.schema)
        schema = await doctor_schema(connection, patient.schema)
    basis = [] if schema.can_use else [f"USAGE on schema {patient.schema}"]
    insert = basis + _lacking_to_insert(relations)
    work = insert + _lacking_to_work(relations)
    owns = all(row.is_owner for row in relations.values())
    role = patient.server.role
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
        return [Finding(Level.FAIL, "grants", text, f"to insert, grant {missing}", data)]
    if work:
        missing = "; ".join(work)
        return [Finding(Level.WARN, "grants", text, f"to work jobs, grant {missing}", data)]
    if patient.state.row_security.tables:
        return [_row_security(patient.state.row_security, data)]
    if not may["reindex"]:
        text += " (its leader leaves the indexes as they are)"
    return [Finding(Level.OK, "grants", text, data=data)]


def _row_security(security: RowSecurity, data: dict[str, object]) -> Finding:
    """The server hides rows from the role and reports no error: the jobs wait and are not seen."""
    level = Level.FAIL if security.hidden else Level.WARN
    data = data | {"row_security": security.tables}
    return Finding(level, "grants", security.problem, security.fix, data)


def _lacking_to_insert(relations: dict[str, RelationRow]) -> list[str]:
    lacking: list[str] = []
    migration, job = relations.get("river_migration"), relations.get("river_job")
    sequence = relations.get("river_job_id_seq")
    if migration is not None and not migration.can_select:
        lacking.append("SELECT on river_migration")
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
            lacking.append(f"{', '.join(rights)} on river_job")
    if sequence is not None and not sequence.can_use:
        lacking.append("USAGE on sequence river_job_id_seq")
    return lacking


def _lacking_to_work(relations: dict[str, RelationRow]) -> list[str]:
    lacking: list[str] = []
    for name in _WORKED:
        if (row := relations.get(name)) is None:
            continue
        can = (row.can_select, row.can_insert, row.can_update, row.can_delete)
        rights = [right for right, has in zip(_RIGHTS, can, strict=True) if not has]
        if rights:
            lacking.append(f"{', '.join(rights)} on {name}")
    return lacking
