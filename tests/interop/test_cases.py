"""Every conformance case has a test, or is in the list of those without one."""

from __future__ import annotations

from tests.interop.cases import CASES, DIFFERENT, LEFT_OUT, shown, summary


def test_every_case_is_somewhere() -> None:
    """Each case has either a test or a reason for having none. The cases in which riverpy differs
    from River on purpose have a test."""
    print(summary())
    assert not shown() & set(LEFT_OUT), "has a test now: remove it from the list"
    assert shown() | set(LEFT_OUT) == CASES
    assert set(DIFFERENT) <= shown()
