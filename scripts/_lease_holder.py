"""A process that holds leases, or stands by for them: `python -m scripts._lease_holder`.

It prints a line for each term that begins: the time, by the clock that all processes of a machine
share, and the name. SIGTERM stops it gracefully.
"""

from __future__ import annotations

import argparse
import signal
import time
from datetime import timedelta

import anyio

from riverpy import LeaseLostError, LeaseManager
from tests.kit.fleet import end_with_the_fleet


async def hold(manager: LeaseManager, name: str) -> None:
    """Hold one, again and again."""
    while True:
        try:
            async with manager.hold(name):
                print(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.6f} {name}", flush=True)
                await anyio.sleep_forever()
        except LeaseLostError:
            pass


async def stop_on_sigterm(scope: anyio.CancelScope) -> None:
    """End all."""
    with anyio.open_signal_receiver(signal.SIGTERM) as received:
        async for _ in received:
            scope.cancel()


async def main(arguments: argparse.Namespace) -> None:
    """Run until SIGTERM."""
    manager = LeaseManager(
        arguments.url,
        ttl=timedelta(seconds=arguments.ttl),
        renew_interval=timedelta(seconds=arguments.ttl / 3),
    )
    async with manager, anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_sigterm, tasks.cancel_scope)
        for number in range(arguments.names):
            tasks.start_soon(hold, manager, f"projection:{number}")


if __name__ == "__main__":
    end_with_the_fleet()
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--names", type=int, required=True)
    parser.add_argument("--ttl", type=float, required=True)
    anyio.run(main, parser.parse_args())
