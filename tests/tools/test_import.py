"""What `import riverpy` and its public names load."""

from __future__ import annotations

import subprocess
import sys

import pytest

RARELY_USED = (
    *("cronsim", "difflib", "importlib.resources", "lzma", "multiprocessing"),
    *("shutil", "structlog", "rich", "tomllib", "zoneinfo"),
)
"""Libraries and modules of the standard library that only some programs use."""
ADAPTED = ("psycopg", "sqlalchemy")
"""Parts of the names of libraries whose sessions a client takes, and of riverpy's modules for
them."""


def find_loaded(code: str) -> set[str]:
    """Run the code in a new interpreter, and return the names of the modules that it has loaded."""
    code = f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.split())


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        pytest.param(
            "import riverpy",
            ("riverpy.", "asyncio", "asyncpg", "msgspec"),
            id="import riverpy",
        ),
        pytest.param(
            "from riverpy import Client, Worker",
            (
                "riverpy._tools",
                "riverpy.cli.",
                "riverpy.testing",
                "riverpy.web",
                "click",
                "importlib.metadata",
                *RARELY_USED,
            ),
            id="client",
        ),
    ],
)
def test_loads_only_what_is_needed(code: str, unwanted: tuple[str, ...]) -> None:
    """An import and a command load no module that they do not use at once: such modules cost time
    and memory. A client loads neither psycopg nor SQLAlchemy nor the adapters for them."""
    loaded = find_loaded(code)
    found = {
        name
        for name in loaded
        if name.startswith(unwanted) or any(library in name for library in ADAPTED)
    }
    assert found == set()
