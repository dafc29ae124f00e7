"""What `import riverpy` loads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import riverpy
unwanted = ("riverpy._tools", "riverpy.cli.", "click", "importlib.metadata", "structlog")
adapted = ("psycopg", "sqlalchemy")
print(*(name for name in sys.modules
        if name.startswith(unwanted) or any(library in name for library in adapted)))
"""


def test_import_loads_nothing_that_few_programs_use() -> None:
    """`import riverpy` loads no module of the tools or of the command, neither psycopg nor
    SQLAlchemy nor the adapters for them, and no other library that only some programs use."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
