"""A process that holds leases or waits for them: `python -m scripts._lease_holder`.

It prints a line for each term that starts: the time by the clock that all processes of a machine
share, and the name. SIGTERM stops it gracefully.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio
import structlog

from riverpy import Client, Config, LeaseLostError, LeaseManager
from tests.kit.fleet import end_with_the_fleet

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from riverpy import Lease


async def act(lease: Lease) -> None:
    """Do the work under a lease: print when the term starts, then wait."""
    print(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.6f} {lease.name}", flush=True)
    await anyio.sleep_forever()


async def hold(manager: LeaseManager, name: str) -> None:
    """Acquire a lease again and again."""
    while True:
        try:
            async with manager.hold(name) as lease:
                await act(lease)
        except LeaseLostError:
            pass


async def stop_on_sigterm(scope: anyio.CancelScope) -> None:
    """Cancel the scope at SIGTERM."""
    with anyio.open_signal_receiver(signal.SIGTERM) as received:
        async for _ in received:
            scope.cancel()


async def run_manager(arguments: argparse.Namespace, tasks: TaskGroup) -> None:
    """Hold leases with a manager alone. It polls for free leases."""
    ttl = timedelta(seconds=arguments.ttl)
    async with LeaseManager(arguments.url, ttl=ttl, renew_interval=ttl / 3) as manager, tasks:
        tasks.start_soon(stop_on_sigterm, tasks.cancel_scope)
        for name in arguments.names:
            tasks.start_soon(hold, manager, name)


async def run_client(arguments: argparse.Namespace, tasks: TaskGroup) -> None:
    """Hold leases as singletons of a client, which is notified of free leases."""
    ttl = timedelta(seconds=arguments.ttl)
    config = Config(candidate=False, leader_ttl=ttl, elect_interval=ttl / 3)
    client = Client(arguments.url, config=config)
    for name in arguments.names:
        client.singleton(name, act)
    async with tasks, client.working():
        tasks.start_soon(stop_on_sigterm, tasks.cancel_scope)
        await anyio.sleep_forever()


async def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--ttl", type=float, required=True)
    parser.add_argument("--client", action="store_true")
    arguments = parser.parse_args()
    run = run_client if arguments.client else run_manager
    await run(arguments, anyio.create_task_group())


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    end_with_the_fleet()
    anyio.run(main)
