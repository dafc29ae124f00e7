"""What the listener knows of itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import structlog

from riverpy._log_events import CONNECTION_LOST, CONNECTION_RESTORED
from riverpy._postgres import notifier
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Rig

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema


async def test_lost_listener_hears_nothing(schema: Schema) -> None:
    """While the listener cannot connect again it does not count as one that receives notifications,
    though all else of the client goes on; once it can, it is one."""

    async def until(is_notified: bool) -> None:
        with anyio.fail_after(PATIENCE, reason=f"it is not taken for {is_notified=}"):
            while run._is_listening() is not is_notified:
                await asyncio.sleep(0.005)

    rig = Rig(schema)

    rig.register_task()
    async with proxied(schema.url) as proxy, rig.working(listen_url=proxy.url) as client:
        run: Any = client._run
        await until(is_notified=True)
        proxy.refusing = True
        assert proxy.cut("riverpy listener") == 1
        await until(is_notified=False)
        proxy.refusing = False
        await until(is_notified=True)


async def test_listener_that_is_lost_before_it_has_heard(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that is lost again while its probe is on its way is told of as lost, and at once;
    it does not count as one that receives nothing."""
    monkeypatch.setattr(notifier, "PROBE_TIMEOUT", 2 * PATIENCE)
    rig, is_sent = Rig(schema), asyncio.Event()

    rig.register_task()

    async def lose(*_: object) -> bool:
        is_sent.set()
        return True

    async with proxied(schema.url) as proxy, rig.working(listen_url=proxy.url) as client:
        run: Any = client._run
        send_probe = run._notifier._send_probe
        with structlog.testing.capture_logs() as log, anyio.fail_after(PATIENCE):
            run._notifier._send_probe = lose
            proxy.cut("riverpy listener")
            await is_sent.wait()
            run._notifier._send_probe = send_probe
            proxy.cut("riverpy listener")
            while not run._is_listening():
                await asyncio.sleep(0.005)
    said = [
        line["event"] for line in log if line["event"].startswith(("connection", "notifications"))
    ]
    assert said == [CONNECTION_LOST, CONNECTION_RESTORED] * 2


async def test_listener_that_is_lost_again_and_again(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that never lasts until it has heard is made again more and more seldom."""
    monkeypatch.setattr(notifier, "PROBE_TIMEOUT", 2 * PATIENCE)
    rig = Rig(schema)

    rig.register_task()
    async with proxied(schema.url) as proxy, rig.working(listen_url=proxy.url) as client:
        run: Any = client._run
        send_probe, pauses = run._notifier._send_probe, run._notifier._backoff
        delays: list[float] = []
        is_enough = asyncio.Event()

        async def lose(*_: object) -> bool:
            proxy.cut("riverpy listener")
            return True

        def pause() -> float:
            delays.append(following())
            if len(delays) == 4:
                is_enough.set()
                run._notifier._send_probe = send_probe
            return delays[-1]

        following = pauses.next_delay
        monkeypatch.setattr(pauses, "next_delay", pause)
        run._notifier._send_probe = lose
        with anyio.fail_after(PATIENCE):
            proxy.cut("riverpy listener")
            await is_enough.wait()
            while not run._is_listening():
                await asyncio.sleep(0.005)
    assert delays == sorted(delays)
    assert delays[-1] > delays[0]


async def test_listener_that_cannot_be_tested(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener whose first probe cannot be sent, as while another connection is made again after
    an outage, does not count as one that receives nothing: the probe is sent soon, and the
    connection stays."""
    rig = Rig(schema)

    rig.register_task()
    async with proxied(schema.url) as proxy, rig.working(listen_url=proxy.url) as client:
        run: Any = client._run
        monkeypatch.setattr(notifier, "UNSENT_PROBE_RETRY_DELAY", 0.02)
        resync, resynced = run._notifier._resync, asyncio.Event()

        def tell() -> None:
            resync()
            resynced.set()

        run._notifier._resync = tell
        with anyio.fail_after(PATIENCE):
            async with run._connections.reserved.acquire("a test", PATIENCE):
                monkeypatch.setattr(notifier, "PROBE_TIMEOUT", 0.02)
                proxy.cut("riverpy listener")
                await resynced.wait()
                assert not run._is_listening()
                accepted = proxy.accepted
                monkeypatch.setattr(notifier, "PROBE_TIMEOUT", PATIENCE)
            while not run._is_listening():
                await asyncio.sleep(0.005)
        assert proxy.accepted == accepted


async def test_half_open_listener_is_replaced_once(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that does not answer, without any error, is cut and made again, once: that it
    was cut is no end of the new one, which goes on to prove itself."""
    monkeypatch.setattr(notifier, "PROBE_INTERVAL", 0.05)
    monkeypatch.setattr(notifier, "PROBE_TIMEOUT", 1.0)
    opened: list[object] = []
    probed: list[object] = []
    rig = Rig(schema)

    rig.register_task()
    async with proxied(schema.url) as proxy, rig.working(listen_url=proxy.url) as client:
        run: Any = client._run
        listening = run._notifier
        connect, send_probe = listening._connect, listening._send_probe

        async def connect_again() -> object:
            opened.append(await connect())
            return opened[-1]

        async def send(connection: object, token: str) -> bool:
            is_sent = await send_probe(connection, token)
            probed.append(connection)
            return is_sent

        listening._connect, listening._send_probe = connect_again, send
        proxy.hold("riverpy listener")
        with anyio.fail_after(PATIENCE):
            while run._is_listening():
                await asyncio.sleep(0.005)
            monkeypatch.setattr(notifier, "PROBE_TIMEOUT", PATIENCE)  # the new one is well
            await proxy.release()
            while not opened or probed.count(opened[0]) < 3:
                await asyncio.sleep(0.005)
        assert len(opened) == 1
