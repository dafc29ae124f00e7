"""Merge the metrics pages of several workers into one page, with a label for the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._tools.health.metrics import metric_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from riverpy._tools.processes.slot import RestartCounts

PROCESS_LABEL = "process"
"""The label whose value is the number of the worker process."""


def merge_metrics(pages: Mapping[int, str | None], restarts: Mapping[int, RestartCounts]) -> bytes:
    """Return one page with the metrics of all workers. Each sample gets the label `process`.

    Args:
        pages: the page of each worker, by the number of its process; None: the worker does not
            answer.
        restarts: how often each worker was restarted, by the number of its process.
    """
    headers: dict[str, dict[str, str]] = {}
    """The HELP line and the TYPE line of each metric."""
    samples: dict[str, list[str]] = {}
    for number, page in pages.items():
        name = ""
        for line in (page or "").splitlines():
            if line.startswith("# "):
                _, word, name, _ = line.split(" ", 3)
                headers.setdefault(name, {}).setdefault(word, line)
            else:
                samples.setdefault(name, []).append(_add_process_label(line, number))
    lines = ["".join(_supervisor_metrics(pages, restarts))]
    for name, header in headers.items():
        lines += [f"{line}\n" for line in (*header.values(), *samples.get(name, ()))]
    return "".join(lines).encode()


def _add_process_label(sample: str, process_number: int) -> str:
    """Return a sample line with the label `process` added as its first label."""
    label = f'{PROCESS_LABEL}="{process_number}"'
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def _supervisor_metrics(
    pages: Mapping[int, str | None], restarts: Mapping[int, RestartCounts]
) -> Iterator[str]:
    text = "1 while the worker process answers."
    answers = (({PROCESS_LABEL: str(number)}, page is not None) for number, page in pages.items())
    yield from metric_lines("process_up", "gauge", text, answers)
    text = "Restarts of the worker process, by reason."
    counts = (
        ({PROCESS_LABEL: str(number), "reason": reason}, count)
        for number, of_process in restarts.items()
        for reason, count in of_process._asdict().items()
    )
    yield from metric_lines("process_restarts_total", "counter", text, counts)
