"""The jobs of the shop."""

from datetime import UTC, date, datetime, time, timedelta
from typing import ClassVar

import msgspec
from sqlalchemy import func, select

import riverpy
from shop.models import Order, Product, new_session
from shop.services import PaymentDeclined, StockLevel, services

LOW_STOCK = 5
OFFICE = "office@shop.example"

workers = riverpy.Workers()


# --- the mail after an order


class OrderConfirmation(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "order_confirmation"
    order_id: int


@workers.job(timeout=timedelta(seconds=30))
async def confirm_order(job: riverpy.Job[OrderConfirmation]) -> None:
    async with new_session() as session:
        order = await session.get(Order, job.args.order_id)
    if order is None:
        raise riverpy.JobCancel("the order was deleted")
    text = "\n".join(f"{line.quantity} × {line.sku}" for line in order.lines)
    await services.mailer.send(order.email, f"Your order {order.id}", text)


# --- the payment: tried again for a day, and awaited by the request of the customer


class PaymentCapture(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "payment_capture"
    order_id: int

    def insert_opts(self) -> riverpy.InsertOpts:
        return riverpy.InsertOpts(queue="payments", max_attempts=10)


def next_capture(job: riverpy.Job[PaymentCapture]) -> timedelta:
    return timedelta(minutes=2**job.attempt)


@workers.job(next_retry=next_capture)
async def capture_payment(job: riverpy.Job[PaymentCapture]) -> None:
    async with new_session.begin() as session:
        order = await session.get_one(Order, job.args.order_id, with_for_update=True)
        try:
            receipt = await services.payments.capture(order.id, order.cents)
        except PaymentDeclined:
            receipt = None
        order.status = "paid" if receipt else "declined"
        if receipt:
            lines = [f"{line.quantity} × {line.sku}" for line in order.lines]
            invoice = Invoice(order_id=order.id, lines=lines, cents=order.cents)
            await riverpy.current_client().insert(invoice, tx=session)
    if receipt is None:
        raise riverpy.JobCancel("the payment was declined")
    job.record_output({"receipt": receipt})


# --- the invoice: blocking code in a thread


class Invoice(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "invoice"
    order_id: int
    lines: list[str]
    cents: int


@workers.blocking_job
def write_invoice(job: riverpy.Job[Invoice]) -> None:
    pages = [f"Invoice for order {job.args.order_id}", *job.args.lines, f"{job.args.cents} cents"]
    path = services.invoice_directory / f"{job.args.order_id}.pdf"
    with path.open("wb") as file:
        file.write(b"%PDF-1.7\n")
        for number, page in enumerate(pages, 1):
            if job.cancelled.is_set():
                path.unlink()
                raise riverpy.JobCancel("stopped between two pages")
            file.write(page.encode() + b"\n")
            job.progress(number, len(pages))
    job.record_output({"file": path.name, "bytes": path.stat().st_size})


# --- the stock: steps, so that a retry does not ask the supplier again


class StockSync(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "stock_sync"

    def insert_opts(self) -> riverpy.InsertOpts:
        return riverpy.InsertOpts(unique_opts=riverpy.UniqueOpts(by_queue=True))


@workers.job(timeout=timedelta(minutes=10))
async def sync_stock(job: riverpy.Job[StockSync]) -> None:
    levels = await job.step(
        "fetch", services.supplier.fetch_stock, keep=True, result_type=list[StockLevel]
    )
    await job.step("store", store_levels, levels)
    await job.step("warn", warn_of_low_stock, levels)


async def store_levels(levels: list[StockLevel]) -> None:
    async with new_session.begin() as session:
        for level in levels:
            product = await session.get(Product, level.sku)
            if product is not None:
                product.stock = level.stock


async def warn_of_low_stock(levels: list[StockLevel]) -> None:
    low = [level.sku for level in levels if level.stock < LOW_STOCK]
    if low:
        await services.mailer.send(OFFICE, "Low stock", ", ".join(low))


# --- the reminder: one a day for each order


class PaymentReminder(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "payment_reminder"
    order_id: int

    def insert_opts(self) -> riverpy.InsertOpts:
        unique = riverpy.UniqueOpts(by_args=True, by_period=timedelta(days=1))
        return riverpy.InsertOpts(unique_opts=unique)


@workers.job
async def remind(job: riverpy.Job[PaymentReminder]) -> None:
    async with new_session() as session:
        order = await session.get_one(Order, job.args.order_id)
    if order.status == "paid":
        raise riverpy.JobCancel("the order is paid")
    try:
        await services.mailer.send(order.email, "Please pay", f"{order.cents} cents")
    except ConnectionError:
        raise riverpy.JobSnooze(timedelta(minutes=10)) from None


# --- the report of each day


class NightlyReport(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "nightly_report"
    day: date


@workers.job
async def report(job: riverpy.Job[NightlyReport]) -> None:
    start = datetime.combine(job.args.day, time(), UTC)
    paid = select(func.count(), func.coalesce(func.sum(Order.cents), 0)).where(
        Order.status == "paid",
        Order.created_at >= start,
        Order.created_at < start + timedelta(days=1),
    )
    async with new_session() as session:
        orders, cents = (await session.execute(paid)).one()
    job.record_output({"orders": orders, "cents": cents})
    await services.mailer.send(
        OFFICE, f"Sales of {job.args.day}", f"{orders} orders, {cents} cents"
    )


def report_of_yesterday() -> NightlyReport:
    return NightlyReport(day=datetime.now(UTC).date() - timedelta(days=1))


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(), "payments": riverpy.QueueConfig(max_workers=10)},
    periodic_jobs=[
        riverpy.PeriodicJob(riverpy.cron("0 3 * * *"), report_of_yesterday, id="nightly-report")
    ],
)
