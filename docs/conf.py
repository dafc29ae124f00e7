"""Sphinx configuration of the documentation site. `scripts/docs` builds it."""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.ext.napoleon.docstring import GoogleDocstring

import riverpy  # noqa: F401 - loads the modules whose docstrings are shown

if TYPE_CHECKING:
    from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "riverpy"
author = "the riverpy authors"
copyright = author  # noqa: A001
version = release = version_of("riverpy-queue")

# `Client` and `Transaction` are names in riverpy and in riverpy.sync.
suppress_warnings = ["ref.python"]
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "click_reference"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_ext"]

html_theme = "furo"
html_title = f"riverpy {release}"
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# Single backticks in docstrings are code.
default_role = "code"

linkcheck_timeout = 20
linkcheck_anchors = False


def import_type_names(module: ModuleType) -> None:
    """Run the imports under `if TYPE_CHECKING:` of a module, so that autodoc finds its types."""
    for node in ast.parse(Path(str(module.__file__)).read_text("utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                # A package of stubs exists for type checkers only.
                with suppress(ImportError):
                    if isinstance(statement, (ast.Import, ast.ImportFrom)):
                        exec(ast.unparse(statement), vars(module))  # noqa: S102


for name, imported in list(sys.modules.items()):
    if name.split(".")[0] == "riverpy":
        import_type_names(imported)


def parse_as_text(docstring: GoogleDocstring) -> list[str]:
    """Parse the docstring of an attribute as others: "Whether it is open: …" names no type."""
    docstring._what = "method"  # noqa: SLF001
    docstring._parse()  # noqa: SLF001
    return []


GoogleDocstring._parse_attribute_docstring = parse_as_text  # noqa: SLF001
