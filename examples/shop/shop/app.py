"""The web API of the shop: `uvicorn shop.app:app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Response
from pydantic import BaseModel, PositiveInt
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import riverpy
import riverpy.web
from shop import jobs
from shop.models import Order, OrderLine, Product, new_session

PAYMENT_TIMEOUT = timedelta(seconds=10)
"""How long a customer waits for the answer of the bank. The job continues after it."""


async def open_session() -> AsyncIterator[AsyncSession]:
    async with new_session.begin() as session:
        yield session


Session = Annotated[AsyncSession, Depends(open_session, scope="function")]
Client = Annotated[riverpy.Client, Depends(riverpy.web.client)]


@asynccontextmanager
async def own_lifespan(_app: FastAPI) -> AsyncIterator[None]:
    url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+asyncpg")
    engine = create_async_engine(url)
    new_session.configure(bind=engine)
    yield
    await engine.dispose()


app = FastAPI(lifespan=riverpy.web.lifespan(jobs.client, inner=own_lifespan))


class NewLine(BaseModel):
    sku: str
    quantity: PositiveInt


class NewOrder(BaseModel):
    email: str
    lines: list[NewLine]


async def get_order(order_id: int, session: Session) -> Order:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404, "no such order")
    return order


FoundOrder = Annotated[Order, Depends(get_order, scope="function")]


@app.post("/orders", status_code=201)
async def create_order(new: NewOrder, session: Session, client: Client) -> dict[str, int]:
    order = Order(email=new.email, cents=0)
    for line in new.lines:
        product = await session.get(Product, line.sku, with_for_update=True)
        if product is None or product.stock < line.quantity:
            raise HTTPException(409, f"{line.sku} is not in stock")
        product.stock -= line.quantity
        order.cents += line.quantity * product.cents
        order.lines.append(OrderLine(sku=line.sku, quantity=line.quantity))
    session.add(order)
    await session.flush()
    await client.insert(jobs.OrderConfirmation(order_id=order.id), tx=session)
    return {"id": order.id, "cents": order.cents}


@app.get("/orders/{order_id}")
async def show_order(order: FoundOrder) -> dict[str, str]:
    return {"status": order.status}


@app.post("/orders/{order_id}/payment")
async def pay(order_id: int, client: Client, response: Response) -> dict[str, str]:
    async with new_session() as session:  # ends before the wait: no transaction stays open
        order = await get_order(order_id, session)
    if order.status == "paid":
        raise HTTPException(409, "the order is paid")
    capture = jobs.PaymentCapture(order_id=order_id)
    try:
        row = await client.insert_and_wait(capture, timeout=PAYMENT_TIMEOUT)
    except riverpy.WaitTimeoutError:
        response.status_code = 202
        return {"status": "waiting"}
    if row.state != "completed":
        raise HTTPException(402, "the payment was declined")
    return {"status": "paid", **riverpy.result(row, type=dict[str, str])}


@app.post("/orders/{order_id}/reminder", status_code=202)
async def send_reminder(order: FoundOrder, session: Session, client: Client) -> dict[str, bool]:
    result = await client.insert(jobs.PaymentReminder(order_id=order.id), tx=session)
    return {"is_new": not result.unique_skipped_as_duplicate}


@app.post("/stock/sync", status_code=202)
async def start_stock_sync(session: Session, client: Client) -> dict[str, int]:
    result = await client.insert(jobs.StockSync(), tx=session)
    return {"job_id": result.job.id}
