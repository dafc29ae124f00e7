"""Tracing: suppresses the driver's OpenTelemetry spans for riverpy's own statements.

A key in OpenTelemetry's context suppresses the spans. This module does not import OpenTelemetry,
because only a program that imports OpenTelemetry has an instrumentation.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

_OLD_SUPPRESS_KEY = "suppress_instrumentation"
"""The context key of older versions of OpenTelemetry. Instrumentations still read it."""


@contextmanager
def suppress_tracing(*, trace_internal: bool = False) -> Generator[None]:
    """Suppress the driver's spans in the `with` block, except if `trace_internal` is True."""
    context: Any = None if trace_internal else sys.modules.get("opentelemetry.context")
    if context is None:
        yield
        return
    marked = context.set_value(_OLD_SUPPRESS_KEY, True)
    if key := getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None):
        marked = context.set_value(key, True, marked)
    token = context.attach(marked)
    try:
        yield
    finally:
        context.detach(token)
