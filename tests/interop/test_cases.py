"""Every case of conformance has a test, or is in the list of those that have none."""

from __future__ import annotations

from tests.interop.cases import (
    CASES,
    DIFFERENT,
    LEFT_OUT,
    NO_TEST_YET,
    shown,
    summary,
    waiting,
    without_test,
)


def test_every_case_is_somewhere() -> None:
    """Each case has a test or a reason for having none, but not both, unless riverpy differs from
    River on purpose."""
    print(summary())
    left_out, different = set(LEFT_OUT), set(DIFFERENT)
    assert not waiting() & left_out
    assert not (waiting() | left_out) & different
    assert not shown() & (waiting() | left_out), "has a test now: remove it from the list"
    assert without_test() <= set(NO_TEST_YET)
    assert shown() | waiting() | left_out | different | set(NO_TEST_YET) == CASES
