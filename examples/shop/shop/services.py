"""The services of other companies that the shop uses. Tests replace them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec


class PaymentDeclined(Exception):
    """The bank refuses the payment. Another attempt would fail too."""


class StockLevel(msgspec.Struct, frozen=True):
    sku: str
    stock: int


class Mailer(Protocol):
    async def send(self, to: str, subject: str, text: str) -> None: ...


class Payments(Protocol):
    async def capture(self, order_id: int, cents: int) -> str:
        """Take the money, once for each order, and return the number of the receipt."""
        ...


class Supplier(Protocol):
    async def fetch_stock(self) -> list[StockLevel]: ...


class Console:
    """Stands for all services while you develop the shop."""

    async def send(self, to: str, subject: str, text: str) -> None:
        print(f"mail to {to}: {subject}\n{text}")

    async def capture(self, order_id: int, cents: int) -> str:
        print(f"captured {cents} cents for order {order_id}")
        return f"receipt-{order_id}"

    async def fetch_stock(self) -> list[StockLevel]:
        return [StockLevel("tea", 20), StockLevel("cup", 2)]


@dataclass
class Services:
    mailer: Mailer = field(default_factory=Console)
    payments: Payments = field(default_factory=Console)
    supplier: Supplier = field(default_factory=Console)
    invoice_directory: Path = Path("invoices")


services = Services()
