"""What the plugin of riverpy has to know about the shop, and the services that tests replace."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from fakes import FakeMailer, FakePayments, FakeSupplier
from httpx2 import ASGITransport, AsyncClient
from shop import jobs
from shop.app import app
from shop.models import Base, Order, OrderLine, Product, new_session
from shop.services import services
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import riverpy
import riverpy.web


@pytest.fixture(scope="session")
def riverpy_prepare() -> Callable[[str], Awaitable[None]]:
    async def create_tables(url: str) -> None:
        engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"))
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await engine.dispose()

    return create_tables


@pytest.fixture
def riverpy_workers() -> riverpy.Workers:
    return jobs.workers


@pytest.fixture
def riverpy_queues() -> dict[str, riverpy.QueueConfig]:
    return dict(jobs.client.queues)


@pytest.fixture
def riverpy_periodic_jobs() -> list[riverpy.PeriodicJob]:
    return list(jobs.client.periodic_jobs)


@pytest.fixture
def riverpy_session_makers() -> list[async_sessionmaker[AsyncSession]]:
    return [new_session]


@pytest.fixture
async def http(riverpy_client: riverpy.Client) -> AsyncIterator[AsyncClient]:
    """Sends requests to the application."""
    app.dependency_overrides[riverpy.web.client] = lambda: riverpy_client
    async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as http:
        yield http
    app.dependency_overrides.clear()


@pytest.fixture(autouse=True)
def mailer(monkeypatch: pytest.MonkeyPatch) -> FakeMailer:
    fake = FakeMailer()
    monkeypatch.setattr(services, "mailer", fake)
    return fake


@pytest.fixture(autouse=True)
def payments(monkeypatch: pytest.MonkeyPatch) -> FakePayments:
    fake = FakePayments()
    monkeypatch.setattr(services, "payments", fake)
    return fake


@pytest.fixture(autouse=True)
def supplier(monkeypatch: pytest.MonkeyPatch) -> FakeSupplier:
    fake = FakeSupplier()
    monkeypatch.setattr(services, "supplier", fake)
    return fake


@pytest.fixture(autouse=True)
def invoice_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(services, "invoice_directory", tmp_path)
    return tmp_path


async def add_order(status: str = "new") -> Order:
    """Store two products and an order of 1300 cents."""
    async with new_session.begin() as session:
        session.add_all(
            [
                Product(sku="tea", name="Tea", cents=400, stock=10),
                Product(sku="cup", name="Cup", cents=500, stock=10),
            ]
        )
        await session.flush()
        order = Order(email="ann@example.org", cents=1300, status=status)
        order.lines = [OrderLine(sku="tea", quantity=2), OrderLine(sku="cup", quantity=1)]
        session.add(order)
    return order


@pytest.fixture
async def order(riverpy_session: AsyncSession) -> Order:
    """An order in the transaction of the test."""
    return await add_order()


@pytest.fixture
async def committed_order(riverpy_client: riverpy.Client) -> Order:
    """An order that a running client sees too."""
    return await add_order()
