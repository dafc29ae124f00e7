"""Tracing: suppresses the driver's OpenTelemetry spans for riverpy's own statements.

A key in OpenTelemetry's context suppresses the spans. This module does not import OpenTelemetry: a
program that has not imported OpenTelemetry has no instrumentation.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_UNCHANGED = nullcontext()
_PLAIN_KEY = "suppress_instrumentation"
"""The context key of older versions of OpenTelemetry. Instrumentations still read it."""


def untraced(*, trace_internal: bool = False) -> AbstractContextManager[None]:
    """Suppress the driver's spans in the block, unless `trace_internal` is True."""
    context: Any = None if trace_internal else sys.modules.get("opentelemetry.context")
    return _UNCHANGED if context is None else _Suppressed(context)


class _Suppressed(AbstractContextManager[None]):
    __slots__ = ("_context", "_token")

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        context = self._context
        marked = context.set_value(_PLAIN_KEY, True)
        if key := getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None):
            marked = context.set_value(key, True, marked)
        self._token = context.attach(marked)

    def __exit__(self, *_error: object) -> None:
        self._context.detach(self._token)
