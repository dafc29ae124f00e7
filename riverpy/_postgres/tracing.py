"""Tracing: suppresses the driver's OpenTelemetry spans for riverpy's own statements.

A key in OpenTelemetry's context suppresses the spans. This module does not import OpenTelemetry: a
program that has not imported OpenTelemetry has no spans.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

_OLD_SUPPRESS_KEY = "suppress_instrumentation"
"""The context key that suppresses spans in older versions of OpenTelemetry. Instrumentations still
read this key."""
_NO_SUPPRESSION = nullcontext()


def suppress_tracing(*, trace_internal: bool = False) -> AbstractContextManager[None]:
    """Suppress the driver's spans in the `with` block. If `trace_internal` is True, do nothing."""
    context: Any = None if trace_internal else sys.modules.get("opentelemetry.context")
    return _NO_SUPPRESSION if context is None else _suppress_tracing(context)


@contextmanager
def _suppress_tracing(context: Any) -> Generator[None]:
    """Suppress the driver's spans in the `with` block. `context` is the module
    `opentelemetry.context`."""
    marked = context.set_value(_OLD_SUPPRESS_KEY, True)
    if key := getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None):
        marked = context.set_value(key, True, marked)
    token = context.attach(marked)
    try:
        yield
    finally:
        context.detach(token)
