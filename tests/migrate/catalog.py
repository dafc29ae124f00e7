"""Reads PostgreSQL's catalog of a schema, in the form of the vectors `catalog-vN.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncpg

Catalog = dict[str, Any]

_VECTORS = Path(__file__).parent.parent / "vectors"

_TABLES = """
    SELECT c.oid, c.relname AS name, c.reloptions, obj_description(c.oid) AS comment,
        CASE c.relpersistence WHEN 'p' THEN 'permanent' WHEN 'u' THEN 'unlogged' END AS persistence
    FROM pg_class AS c WHERE c.relnamespace = $1::regnamespace AND c.relkind = 'r'
"""
_COLUMNS = """
    SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnum,
        NOT a.attnotnull AS nullable, pg_get_expr(d.adbin, d.adrelid) AS default
    FROM pg_attribute AS a
    LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
_CONSTRAINTS = """
    SELECT conname AS name, contype::text AS type, pg_get_constraintdef(oid) AS definition,
        convalidated AS validated
    FROM pg_constraint WHERE conrelid = $1 AND contype <> 'n' ORDER BY conname
"""
_INDEXES = """
    SELECT c.relname AS name, i.indisunique AS unique, i.indisprimary AS primary,
        i.indisvalid AS valid, pg_get_indexdef(c.oid) AS definition
    FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
    WHERE i.indrelid = $1 ORDER BY c.relname
"""
_TRIGGERS = """
    SELECT tgname AS name, pg_get_triggerdef(oid) AS definition
    FROM pg_trigger WHERE tgrelid = $1 AND NOT tgisinternal ORDER BY tgname
"""
_FUNCTIONS = """
    SELECT p.proname AS name, pg_get_function_arguments(p.oid) AS args,
        pg_get_function_result(p.oid) AS returns, l.lanname AS language,
        p.provolatile::text AS volatility, p.proisstrict AS strict, p.proparallel::text AS parallel
    FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
    WHERE p.pronamespace = $1::regnamespace ORDER BY p.proname
"""
_ENUMS = """
    SELECT t.typname AS name, array_agg(e.enumlabel::text ORDER BY e.enumsortorder) AS labels
    FROM pg_type AS t JOIN pg_enum AS e ON e.enumtypid = t.oid
    WHERE t.typnamespace = $1::regnamespace GROUP BY t.typname
"""
_SEQUENCES = """
    SELECT c.relname AS name, format_type(s.seqtypid, NULL) AS type, s.seqstart AS start_value,
        s.seqincrement AS increment_by
    FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = s.seqrelid
    WHERE c.relnamespace = $1::regnamespace ORDER BY c.relname
"""
_ROWS = "SELECT to_jsonb(m) - 'created_at' FROM river_migration AS m ORDER BY version"


async def read_catalog(connection: asyncpg.Connection[Any], schema: str) -> Catalog:
    """The catalog of `schema`, its own name written as `public`."""
    namespace = f'"{schema}"'
    async with connection.transaction():
        await connection.execute(f"SET LOCAL search_path = {namespace}")
        tables: Catalog = {}
        for table in await connection.fetch(_TABLES, namespace):
            tables[table["name"]] = {
                "persistence": table["persistence"],
                "reloptions": table["reloptions"],
                "comment": table["comment"],
                "columns": await _rows(connection, _COLUMNS, table["oid"]),
                "constraints": await _rows(connection, _CONSTRAINTS, table["oid"]),
                "indexes": await _rows(connection, _INDEXES, table["oid"]),
                "triggers": await _rows(connection, _TRIGGERS, table["oid"]),
            }
        catalog: Catalog = {
            "tables": tables,
            "functions": await _rows(connection, _FUNCTIONS, namespace),
            "enums": {
                row["name"]: row["labels"] for row in await connection.fetch(_ENUMS, namespace)
            },
            "sequences": await _rows(connection, _SEQUENCES, namespace),
            "river_migration_rows": [],
        }
        if "river_migration" in tables:
            catalog["river_migration_rows"] = [
                json.loads(row[0]) for row in await connection.fetch(_ROWS)
            ]
    text = json.dumps(catalog)
    for spelling in (f"{schema}.", json.dumps(f'"{schema}".')[1:-1]):
        text = text.replace(spelling, "public.")
    return json.loads(text)


async def _rows(
    connection: asyncpg.Connection[Any], statement: str, argument: object
) -> list[dict[str, Any]]:
    return [dict(row) for row in await connection.fetch(statement, argument)]


def catalog_vector(version: int) -> Catalog:
    """What River left at this version, without what is not compared: the text of functions.

    Version 8 changes no object, so its catalog is that of version 7 with one more record.
    """
    recorded = min(version, 7)
    vector = json.loads(_VECTORS.joinpath(f"catalog-v{recorded}.json").read_text("utf-8"))
    if version == 8:
        vector["river_migration_rows"].append({"line": "main", "version": 8})
    for function in vector["functions"]:
        del function["body_md5"]
    return {
        name: vector[name]
        for name in ("tables", "functions", "enums", "sequences", "river_migration_rows")
    }


def without_history(catalog: Catalog) -> Catalog:
    """Without what a way down leaves behind for good: the enum value, the numbers of new columns
    and of new rows of `river_migration`."""
    catalog = json.loads(json.dumps(catalog))
    for table in catalog["tables"].values():
        for number, column in enumerate(table["columns"], 1):
            column["attnum"] = number
    for labels in catalog["enums"].values():
        if "pending" in labels:
            labels.remove("pending")
    catalog["river_migration_rows"] = [
        {name: value for name, value in row.items() if name != "id"}
        for row in catalog["river_migration_rows"]
    ]
    return catalog
