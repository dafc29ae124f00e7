"""SQL files: what a user sees when the installation does not have them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import riverpy

PACKAGE = Path(riverpy.__file__).parent


@pytest.mark.parametrize(
    "call",
    [
        "riverpy._postgres.sql_files.load_statements('river_job')",
        "riverpy._postgres.schema.list_migration_lines()",
    ],
)
def test_package_in_a_zip_file(tmp_path: Path, call: str) -> None:
    """riverpy cannot read its SQL files in a zip file. The error names the file, and is not an
    error of the database, which services would retry."""
    package = tmp_path / "packages.zip"
    with zipfile.ZipFile(package, "w") as archive:
        for path in PACKAGE.rglob("*.py"):
            archive.write(path, path.relative_to(PACKAGE.parent))
    code = (
        f"import sys; sys.path.insert(0, {str(package)!r})\n"
        "import riverpy._postgres.schema\n"
        f"try: {call}\n"
        "except riverpy.errors.ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"riverpy cannot read its own SQL file {package}/"), done.stderr
    assert done.stdout.endswith("Install riverpy again, as files and not as a zip file.\n")
