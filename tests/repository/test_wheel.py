"""The built wheel, installed without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--wheel-dir", directory, ROOT], check=True)
    (built,) = directory.glob("*.whl")
    return built


def test_wheel_holds_the_sql(wheel: Path) -> None:
    """The wheel contains every SQL file below the package, the templates, style and script of the
    dashboard, and no tests or scripts."""
    names = zipfile.ZipFile(wheel).namelist()
    ours = {f"riverpy/{path.relative_to(ROOT)}" for path in (ROOT / "sql").rglob("*.sql")}
    assert ours
    assert ours <= set(names)
    pages = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "riverpy" / "_dashboard").rglob("*")
        if path.suffix in {".html", ".css", ".js"}
    }
    assert len(pages) > 5
    assert pages <= set(names)
    assert "riverpy/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "riverpy",
        "_riverpy_pytest",
        f"{wheel.name.partition('-py3')[0]}.dist-info",
    }


@pytest.mark.timeout(300)
def test_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """In a clean environment the command line runs and finds every query file."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    install = ["install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *install, wheel], cwd=tmp_path, check=True)

    def output(*command: str | Path) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RIVERPY_"))}
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
        )
        return done.stdout

    riverpy = python.with_name("riverpy")
    assert output(riverpy, "--version").startswith("riverpy, version ")
    assert "CREATE TABLE" in output(riverpy, "migrate", "sql").upper()
    assert "worker" in output(python, "-m", "riverpy", "--help")
    files = [path.stem for path in (ROOT / "sql" / "queries").glob("*.sql")]
    code = (
        "from riverpy._postgres.sql_files import load_statements; "
        f"print(*[len(load_statements(file)) for file in {files}])"
    )
    assert len(counts := output(python, "-c", code).split()) == len(files)
    assert "0" not in counts
    where = output(python, "-c", "import riverpy; print(riverpy.__file__)")
    assert where.startswith(str(tmp_path))
