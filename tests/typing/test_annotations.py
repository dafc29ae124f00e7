"""The annotations of public names can be evaluated, as msgspec, help() and other tools do."""

from __future__ import annotations

import pydoc
from importlib import import_module
from inspect import isclass, isfunction
from typing import get_type_hints

import pytest

MODULES = ("riverpy", "riverpy.joblog", "riverpy.otel", "riverpy.sync", "riverpy.testing")


@pytest.mark.parametrize("module_name", MODULES)
def test_public_names(module_name: str) -> None:
    """Help can be shown for each public name, and the annotations of each class can be read. The
    same is true for the functions of `riverpy`."""
    module = import_module(module_name)
    names = getattr(module, "__all__", [name for name in vars(module) if name[0].isupper()])
    values = {name: getattr(module, name) for name in names}
    assert any(map(isclass, values.values()))
    failures: dict[str, Exception] = {}
    for name, value in values.items():
        is_own = getattr(value, "__module__", "").startswith("riverpy")
        if not is_own or not (isclass(value) or isfunction(value)):
            continue
        try:
            pydoc.render_doc(value)
            if isclass(value) or module_name == "riverpy":
                get_type_hints(value)
        except Exception as error:
            failures[name] = error
    assert not failures
