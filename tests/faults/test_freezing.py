"""The tool that freezes a process of the server, for a process that holds a lock that all others
need."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Any

import anyio
import psutil

from tests.kit import server_faults

if TYPE_CHECKING:
    import pytest


async def test_state_read_that_a_frozen_process_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the state of a stopped process times out when that process holds an internal lock
    of the server. The process then continues, and is stopped elsewhere."""
    process = subprocess.Popen(["sleep", "600"])
    looks: list[str] = []
    sent: list[signal.Signals] = []
    send = server_faults._signal

    def recorded(pid: int, number: signal.Signals) -> bool:
        sent.append(number)
        return send(pid, number)

    class Held:
        async def fetchval(self, *_: Any) -> bool:
            looks.append(psutil.Process(process.pid).status())
            if len(looks) == 1:
                await anyio.sleep_forever()
            return True

    connection: Any = Held()
    monkeypatch.setattr(server_faults, "_signal", recorded)
    monkeypatch.setattr(server_faults, "STATE_TIMEOUT", 0.05)
    monkeypatch.setattr(server_faults, "MEND_TIMEOUT", 30.0)
    try:
        await server_faults._stop_where_it_waits(connection, process.pid)
        assert looks == [psutil.STATUS_STOPPED] * 2
        assert sent == [signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP]
    finally:
        process.kill()
        process.wait()
