"""Metadata that other programs may have written, and that no part of riverpy may fail at."""

from __future__ import annotations

_PAST = "2020-01-31T18:00:00.000000Z"

DAMAGED_EXPIRIES = (
    '"riverpy:expires_at"',
    '["riverpy:expires_at"]',
    f'["riverpy:expires_at", "{_PAST}"]',
    f'[{{"riverpy:expires_at": "{_PAST}"}}]',
    "1",
    "null",
    "true",
    f'{{"a": {{"riverpy:expires_at": "{_PAST}"}}}}',
    f'{{"riverpy:expires_at": ["{_PAST}"]}}',
    f'{{"riverpy:expires_at": {{"at": "{_PAST}"}}}}',
    *(
        f'{{"riverpy:expires_at": {value}}}'
        for value in (
            "null",
            "0",
            "1e300",
            "false",
            '""',
            '"2026-01-31"',
            '"infinity"',
            '"-infinity"',
            '"99999-01-31T18:00:00.000000Z"',
            '"0000-00-00"',
            f'"{_PAST[:-1]}"',
            f'"{_PAST} "',
            f'"{_PAST}\\n"',
            f'"{_PAST * 200_000}"',
        )
    ),
)
"""JSON texts of metadata with the key `riverpy:expires_at` of which none is a time in the form that
an insert with `expires_in` writes. So none of these jobs expires."""
