"""scripts/limits.py finds each kind of violation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scripts.limits import violations

if TYPE_CHECKING:
    from pathlib import Path

PARAMETERS = ", ".join("abcdefghi")
NESTED = "".join(f"{' ' * depth}if x:\n" for depth in range(1, 7)) + " " * 7 + "pass\n"


@pytest.mark.parametrize(
    ("text", "violation"),
    [
        pytest.param("\n" * 601, "pack.b has too many lines", id="module"),
        pytest.param("def f():\n" + " pass\n" * 60, "pack.b:f has too many lines", id="function"),
        pytest.param(
            f"class A:\n class B:\n  def __init__(self, {PARAMETERS}): pass\n",
            "pack.b:A.B.__init__ has too many parameters",
            id="constructor",
        ),
        pytest.param(f"def f(x):\n{NESTED}", "pack.b:f is nested too deeply", id="nesting"),
    ],
)
def test_finds_large_code(tmp_path: Path, text: str, violation: str) -> None:
    """The check reports a module, a function, a constructor or a nesting beyond its limit."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "a.py").write_text("")
    (package / "b.py").write_text(text)
    assert violations(tmp_path, "pack") == {violation}


@pytest.mark.parametrize(
    "text",
    [
        "import pack.a",
        "from pack import a",
        "from . import a",
        "from .a import x",
        "if TYPE_CHECKING:\n from pack.a import x",
        "def f():\n import pack.a",
    ],
)
def test_finds_an_import_cycle(tmp_path: Path, text: str) -> None:
    """The check reports the modules of an import cycle, however the imports are written."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("import pack.b")
    (package / "b.py").write_text(text)
    (package / "c.py").write_text("import pack.a")
    cycle = {"pack.a is in an import cycle", "pack.b is in an import cycle"}
    assert violations(tmp_path, "pack") == cycle
