"""The texts of the statements, in the style of each library."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.kit.statements import read_statements

TEXTS = read_statements(Path(__file__).with_name("statements.sql"))
ARGS = "{}"
KIND = "noop"
QUEUE = "default"
VALUES = {"p1": ARGS, "p2": KIND, "p3": QUEUE}
ORDER_VALUES = {"p1": "note"}


@cache
def as_psycopg(name: str) -> str:
    """Return a statement with the parameters `%(p1)s`, …, for psycopg and Django."""
    return re.sub(r"\$(\d)", r"%(p\1)s", TEXTS[name])


@cache
def as_named(name: str) -> str:
    """Return a statement with the parameters `:p1`, …, for SQLAlchemy."""
    return re.sub(r"\$(\d)", r":p\1", TEXTS[name])
