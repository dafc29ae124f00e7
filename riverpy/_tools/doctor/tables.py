"""Checks of the migrations of River's and riverpy's tables, and of the privileges of the database
role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import SCHEMA_NAME_LENGTH_MAX, SCHEMA_NAME_TOO_LONG_TEXT
from riverpy._postgres.schema import (
    FEATURES_BY_MIGRATION,
    MAIN_MIGRATION_LINE,
    RIVERPY_MIGRATION_LINE,
    load_migrations,
    make_migrate_command,
)
from riverpy._postgres.sql_files import quote_identifier
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.statements import read_relation_privileges, read_schema_privileges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._postgres.schema import RowSecurity, SchemaState
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import RelationPrivilegesRow

_RIVER_TABLES = ("river_job", "river_queue", "river_leader")
_RIVERPY_TABLES_BY_VERSION = {
    1: "riverpy_client",
    2: "riverpy_periodic",
    4: "riverpy_lease",
    5: "riverpy_exec",
    6: "riverpy_queue_owner",
    9: "riverpy_job_count",
}
"""riverpy's own tables. The key is the version of the migration that creates the table."""
_INSERT_PRIVILEGES = {
    "river_migration": ("SELECT",),
    "river_job": ("SELECT", "INSERT", "UPDATE (kind)"),
    "river_job_id_seq": ("USAGE",),
}
"""The privileges that a role needs to insert jobs."""
_WORK_PRIVILEGES = dict.fromkeys(
    (*_RIVER_TABLES, *_RIVERPY_TABLES_BY_VERSION.values()), ("SELECT", "INSERT", "UPDATE", "DELETE")
)
"""The privileges that a role needs to work jobs, in addition to those for inserting jobs."""


def check_migrations(state: SchemaState, requested_schema: str | None, url: str) -> list[Finding]:
    """Report the migrations of River's tables and of riverpy's own tables. The remedy for missing
    migrations is a `riverpy migrate up` command for the database `url`. `requested_schema` is the
    schema that the user named, or None."""
    command = make_migrate_command("riverpy migrate up", requested_schema, url)
    main = _check_river_migrations(state, command)
    if state.missing_needed_versions() or state.are_migrations_unrecorded():
        return [main]
    return [main, _check_riverpy_migrations(state, command)]


def _check_river_migrations(state: SchemaState, command: str) -> Finding:
    newest = max(load_migrations(MAIN_MIGRATION_LINE))
    found = state.applied_versions(MAIN_MIGRATION_LINE)
    data = _migration_line_finding_data(state, MAIN_MIGRATION_LINE)
    if len(state.schema.encode()) > SCHEMA_NAME_LENGTH_MAX:
        return fail_finding(
            SCHEMA_NAME_TOO_LONG_TEXT, "give it a shorter name: ALTER SCHEMA … RENAME TO …", **data
        )
    if state.are_migrations_unrecorded() or state.skipped_versions(MAIN_MIGRATION_LINE):
        is_unrecorded = state.are_migrations_unrecorded()
        message = (
            state.make_unrecorded_migrations_message()
            if is_unrecorded
            else state.make_skipped_versions_message(MAIN_MIGRATION_LINE)
        )
        problem, _, fix = message.partition(". ")
        return fail_finding(problem, fix, **data)
    if not found:
        return fail_finding(
            f'schema "{state.schema}" has no tables of River', f"run `{command}`", **data
        )
    if needed := state.missing_needed_versions():
        text = (
            f'River\'s tables in "{state.schema}" lack version{"s" if len(needed) > 1 else ""} '
            f"{', '.join(map(str, needed))}, which this riverpy needs"
        )
        return fail_finding(text, f"run `{command}`", **data)
    if state.unknown_versions(MAIN_MIGRATION_LINE):
        return _unknown_version_finding(
            state, MAIN_MIGRATION_LINE, f'River\'s tables in "{state.schema}"'
        )
    text = f'river {max(found)} of {newest} in "{state.schema}"'
    if state.missing_versions(MAIN_MIGRATION_LINE):
        text += f": version {newest} changes nothing on PostgreSQL. `riverpy migrate up` records it"
    return ok_finding(text, **data)


def _check_riverpy_migrations(state: SchemaState, command: str) -> Finding:
    newest = max(load_migrations(RIVERPY_MIGRATION_LINE))
    found = state.applied_versions(RIVERPY_MIGRATION_LINE)
    missing = state.missing_versions(RIVERPY_MIGRATION_LINE)
    off = [
        FEATURES_BY_MIGRATION[version] for version in missing if version in FEATURES_BY_MIGRATION
    ]
    data = _migration_line_finding_data(state, RIVERPY_MIGRATION_LINE)
    if missing:
        text = (
            f"riverpy's own tables are at version {max(found, default=0)} of {newest}. Off: "
            f"{'; '.join(off) or 'the new features'}"
        )
        return warn_finding(text, f"run `{command}`", **data, off=off)
    if state.unknown_versions(RIVERPY_MIGRATION_LINE):
        return _unknown_version_finding(
            state, RIVERPY_MIGRATION_LINE, "riverpy's own tables", off=off
        )
    return ok_finding(f'riverpy {newest} of {newest} in "{state.schema}"', **data, off=off)


def _unknown_version_finding(
    state: SchemaState, line_name: str, tables_text: str, /, **data: object
) -> Finding:
    """Report that the tables have a newer version than this riverpy supports."""
    text = (
        f"{tables_text} are at version {max(state.unknown_versions(line_name))}. This riverpy "
        f"supports only {max(load_migrations(line_name))}"
    )
    return warn_finding(
        text, "update riverpy", **_migration_line_finding_data(state, line_name), **data
    )


def _migration_line_finding_data(state: SchemaState, line_name: str) -> dict[str, object]:
    """Return the facts about one migration line for the `data` of a finding."""
    missing, unknown = state.missing_versions(line_name), state.unknown_versions(line_name)
    return {"schema": state.schema, "line": line_name, "missing": missing, "unknown": unknown}


async def check_dropped_tables(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report tables that were dropped although their migration is recorded."""
    relations = await snapshot.session.read(read_relation_privileges, snapshot.schema)
    applied = snapshot.schema_state.applied_versions(RIVERPY_MIGRATION_LINE)
    own = [table for version, table in _RIVERPY_TABLES_BY_VERSION.items() if version in applied]
    missing = [table for table in (*_RIVER_TABLES, *own) if table not in relations]
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
            f"{tables}; DELETE FROM {record} WHERE line = '{RIVERPY_MIGRATION_LINE}'; then "
            "`riverpy migrate up`"
        )
    return [fail_finding(text, fix, schema=snapshot.schema, missing_tables=missing)]


async def check_grants(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report whether the database role may insert jobs, work jobs, migrate and rebuild indexes."""
    relations = await snapshot.session.read(read_relation_privileges, snapshot.schema)
    on_schema = await snapshot.session.read(read_schema_privileges, snapshot.schema)
    security = snapshot.schema_state.row_security
    usage = [] if "USAGE" in on_schema else [f"USAGE on schema {snapshot.schema}"]
    insert = usage + _find_missing_privileges(relations, _INSERT_PRIVILEGES)
    work = insert + _find_missing_privileges(relations, _WORK_PRIVILEGES)
    is_owner = all(row.is_owned_by_role for row in relations.values())
    role = snapshot.server.session_role
    may = {
        "insert": not insert,
        "work": not insert and not work,
        "migrate": "CREATE" in on_schema and is_owner,
        "reindex": "river_job" in relations and relations["river_job"].is_owned_by_role,
    }
    data: dict[str, object] = {"role": role, **may, "missing_privileges": work}
    able = ", ".join(verb for verb, can in may.items() if can)
    unable = ", ".join(verb for verb, can in may.items() if not can)
    text = f'"{role}" may {able or "do nothing here"}' + (
        f"; it may not {unable}" if unable else ""
    )
    if insert:
        return [fail_finding(text, f"to insert, grant {'; '.join(insert)}", **data)]
    if work:
        return [warn_finding(text, f"to work jobs, grant {'; '.join(work)}", **data)]
    if security.affected_tables:
        return [row_security_finding(security, **data)]
    if not may["reindex"]:
        text += " (as leader it cannot rebuild the indexes)"
    return [ok_finding(text, **data)]


def row_security_finding(security: RowSecurity, /, **data: object) -> Finding:
    """Report tables with row-level security. PostgreSQL can hide rows of these tables from the role
    without an error, so riverpy does not find some jobs."""
    report = fail_finding if security.hidden_tables else warn_finding
    return report(
        security.problem_text, security.remedy_text, **data, row_security=security.affected_tables
    )


def _find_missing_privileges(
    relations: Mapping[str, RelationPrivilegesRow], needed_privileges: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the privileges that the role needs and does not have, in the syntax of GRANT, for
    example `SELECT, INSERT on river_job`. Tables and sequences that do not exist are left out."""
    found: list[str] = []
    for name, privileges in needed_privileges.items():
        row = relations.get(name)
        missing = [] if row is None else [one for one in privileges if one not in row.privileges]
        if missing:
            kind = "sequence " if name.endswith("_seq") else ""
            found.append(f"{', '.join(missing)} on {kind}{name}")
    return found
