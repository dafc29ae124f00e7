"""Prints the table of docs/performance.md from the result of a run:

scripts/bench compare --only tx_insert --rounds 5 --json > result.json
python -m scripts._bench.tx_insert.markdown result.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts._bench.tx_insert.names import COLUMNS, SESSIONS, make_measure_key

TITLES = {
    "alone": "transaction without a job",
    "row": "bare INSERT",
    "row_notify": "bare INSERT, NOTIFY",
    "pgqueuer": "PgQueuer",
    "procrastinate": "Procrastinate",
    "chancy": "Chancy",
    "oban": "oban",
}


def make_table(found: dict[str, Any]) -> str:
    """Return the table: a row for each kind of session, a column for each insert that was
    measured. riverpy's figure has its range."""
    rows = {session: found.get(make_measure_key(session), {}) for session in SESSIONS}
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in rows.values())]
    lines = [
        f"| session | {' | '.join(TITLES.get(name, name) for name in columns)} |",
        f"|-|{'-|' * len(columns)}",
    ]
    for session, title in SESSIONS.items():
        spread = found["spread"].get(make_measure_key(session), {})
        cells = [_make_cell(rows[session].get(name), spread, name) for name in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _make_cell(median: float | None, spread: dict[str, list[float]], name: str) -> str:
    if median is None:
        return "–"
    least, most = spread[name]
    text = f"{median:,.0f} µs"
    return f"{text} ({least:,.0f} to {most:,.0f})" if name == "riverpy" else text


if __name__ == "__main__":
    print(make_table(json.loads(Path(sys.argv[1]).read_text())))
