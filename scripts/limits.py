"""Checks the limits of size and structure for every module of the package and the scripts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 8
"""The maximum number of parameters of a constructor, without `self`."""
NESTING_MAX = 5
"""The maximum number of nested blocks in one function."""

_BLOCKS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A module of the package, parsed."""

    def __init__(self, root: Path, path: Path) -> None:
        parts = path.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        text = path.read_text("utf-8")
        self.lines = text.count("\n")
        self.tree = ast.parse(text)

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each limit that the module or one of its functions exceeds."""
        if self.lines > MODULE_LINES_MAX:
            yield f"{self.name} has too many lines"
        for name, function in _functions(self.tree, f"{self.name}:"):
            if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION_LINES_MAX:
                yield f"{name} has too many lines"
            if function.name == "__init__" and _parameters(function) > PARAMETERS_MAX:
                yield f"{name} has too many parameters"
            if _nesting(function) > NESTING_MAX:
                yield f"{name} is nested too deeply"

    def imports(self, known: set[str]) -> set[str]:
        """Return the modules of `known` that this one imports, for type checkers alone too."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    found.add(submodule if submodule in known else base)
        return found & known - {self.name}

    def _base(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module after `from`."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, node.module] if node.module else parts)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Yield each function below a node with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def _parameters(function: Function) -> int:
    """Count the parameters but for `self`."""
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1


def _nesting(node: ast.AST) -> int:
    """Return how many blocks stand inside each other below a node."""
    return max(
        (
            _nesting(child) + isinstance(child, _BLOCKS)
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, _SCOPES)
        ),
        default=0,
    )


def in_cycles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that import themselves through others."""
    return {name for name in graph if name in _reachable(graph, name)}


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that `start` imports, directly or through others."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(graph[name])
    return found


def violations(root: Path, package: str) -> set[str]:
    """Return a sentence for each violation in a package below `root`."""
    modules = [Module(root, path) for path in (root / package).rglob("*.py")]
    names = {module.name for module in modules}
    graph = {module.name: module.imports(names) for module in modules}
    found = {sentence for module in modules for sentence in module.violations()}
    return found | {f"{name} is in an import cycle" for name in in_cycles(graph)}


def main() -> None:
    """Print the violations, and exit with 1 if there are any."""
    root = Path(__file__).parents[1]
    found = violations(root, "riverpy") | violations(root, "scripts")
    for sentence in sorted(found):
        print(sentence)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
