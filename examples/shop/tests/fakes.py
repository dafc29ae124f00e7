"""Stand for the services of other companies."""

from shop.services import StockLevel


class FakeMailer:
    """Keeps the mails."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, str]] = []
        self.error: Exception | None = None

    async def send(self, to: str, subject: str, text: str) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append((to, subject, text))


class FakePayments:
    """A bank that answers as the test says."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, int]] = []
        self.error: Exception | None = None

    async def capture(self, order_id: int, cents: int) -> str:
        if self.error is not None:
            raise self.error
        self.captured.append((order_id, cents))
        return f"receipt-{order_id}"


class FakeSupplier:
    """A supplier that counts how often it was asked."""

    def __init__(self) -> None:
        self.requests = 0
        self.levels = [StockLevel("tea", 20), StockLevel("cup", 2)]

    async def fetch_stock(self) -> list[StockLevel]:
        self.requests += 1
        return self.levels
