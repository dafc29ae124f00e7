"""Every conformance case has a test, or is in the list of those without one."""

from __future__ import annotations

from tests.interop.cases import CASES, DIFFERENT, LEFT_OUT, shown, summary, waiting


def test_every_case_is_somewhere() -> None:
    """Each case has either a test or a reason for having none. The cases in which riverpy differs
    from River on purpose have a test."""
    print(summary())
    without = waiting() | set(LEFT_OUT)
    assert not waiting() & set(LEFT_OUT)
    assert not shown() & without, "has a test now: remove it from the list"
    assert shown() | without == CASES
    assert set(DIFFERENT) <= shown()
