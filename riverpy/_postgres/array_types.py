"""The array types of PostgreSQL that riverpy's statements use. asyncpg takes them from
`ARRAY_TYPES`, instead of reading them from the server."""

from __future__ import annotations


def _make_array_type_row(oid: int, element_type: str, element_oid: int) -> dict[str, object]:
    """Return the row that asyncpg would read for a built-in array type of PostgreSQL."""
    return {
        "oid": oid,
        "ns": "pg_catalog",
        "name": f"_{element_type}",
        "kind": b"b",
        "elemtype": element_oid,
        "elemtype_name": element_type,
        "elemdelim": ",",
        **dict.fromkeys(("attrtypoids", "attrnames", "basetype", "range_subtype")),
    }


ARRAY_TYPES = {
    1000: _make_array_type_row(1000, "bool", 16),
    1001: _make_array_type_row(1001, "bytea", 17),
    1005: _make_array_type_row(1005, "int2", 21),
    1007: _make_array_type_row(1007, "int4", 23),
    1015: _make_array_type_row(1015, "varchar", 1043),
    1016: _make_array_type_row(1016, "int8", 20),
    1022: _make_array_type_row(1022, "float8", 701),
    1185: _make_array_type_row(1185, "timestamptz", 1184),
    1187: _make_array_type_row(1187, "interval", 1186),
    3807: _make_array_type_row(3807, "jsonb", 3802),
}
"""The array types that riverpy's statements use, by oid. The oids of built-in types never
change."""
